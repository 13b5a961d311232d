"""How much of some periods is covered by spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Cover:
    """The union of spans.

    Args:
        spans: begin and end of each, in any order.
    """

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self.spans = sorted(spans)
        edges, lengths = [0.0], [0.0]
        for began, ended in self.spans:
            began = max(began, edges[-1])
            if ended > began:
                edges += [began, ended]
                lengths += [lengths[-1], lengths[-1] + ended - began]
        self._edges, self._lengths = np.array(edges), np.array(lengths)

    def until(self, times: Sequence[float] | Array) -> Array:
        """Return the covered time before each of some times."""
        found: Array = np.interp(times, self._edges, self._lengths)
        return found

    def within(self, times: Sequence[float] | Array, other: Cover | None = None) -> Array:
        """Return the covered time between each two successive times; where ``other`` covers it too."""
        covered = self.until(times)
        if other is not None:  # |A and B| = |A| + |B| - |A or B|
            covered = covered + other.until(times) - Cover([*self.spans, *other.spans]).until(times)
        found: Array = np.diff(covered)
        return found
