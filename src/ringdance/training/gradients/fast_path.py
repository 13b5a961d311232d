"""The fast path of an exchange of gradients: without a mask, while all ranks compute the same gradients.

When several exchanges in a row have found that all ranks compute the same gradients, all take the fast path:
each rank that has exactly these sends them, with a *tag* that shows the number of the step. If the request
succeeds, all ranks had them. A rank that has others refuses the request, so it fails on all ranks, and all
exchange by the mask. Each time that happens they wait longer before they try again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training.collectives import Call
from ringdance.training.gradients.source import GradientSource

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

Array = np.ndarray[Any, Any]

# Steps are distinguished modulo this. A tag has an element for each: 1 for the rank's step, 0 for others.
# The average is above zero for each step that some rank is in, in any floating dtype and for any number of
# ranks. Those that have joined add zeros.
_TAGS = 8
_FIRST_BACKOFF, _MOST_BACKOFF = 2, 256


class DifferentStepsError(Exception):
    """The reduced gradients belong to different steps."""


class FastPath:
    """The state of the fast path; ``open`` and ``expected_kinds`` are equal on all ranks.

    Args:
        engine: of this rank.
        set_id: process set.
        source: the gradients.
        name: of the exchange.
        scales: what multiplies before and after the sum of the average.

    Attributes:
        expected_kinds: the kinds of gradients agreed on last time, if none was sparse; else empty.
        open: whether the next exchange takes the fast path.
    """

    def __init__(
        self, engine: Engine, set_id: int, source: GradientSource, name: str, scales: tuple[float, float]
    ) -> None:
        self.expected_kinds = b""
        self.open = False
        self._engine, self._source = engine, source
        self._call = Call(
            Collective.ALLREDUCE, f"{name}.expected", ReduceOp.AVERAGE, *scales, set_id, grouped=True
        )
        self._indices: tuple[int, ...] = ()
        self._computed = b""
        self._tags: dict[np.dtype[Any], list[Array]] = {}  # of each step, and the one that is sent
        self._in_a_row = 0
        self._backoff = _FIRST_BACKOFF

    def update(self, union: bytes, alike: bool, possible: bool) -> None:
        """Note the outcome of an exchange by the mask.

        Args:
            union: the kinds of gradients that all ranks agreed on; empty if there were sparse ones.
            alike: whether each rank had exactly the expected gradients.
            possible: whether this kind of exchange has a fast path.
        """
        self._in_a_row = self._in_a_row + 1 if alike and union == self.expected_kinds else 0
        self.expected_kinds = union
        self.open = possible and any(union) and self._in_a_row >= self._backoff
        if self.open:
            self._indices = tuple(index for index, kind in enumerate(union) if kind)
            self._computed = bytes(1 if kind else 0 for kind in union)

    def exchange(self, computed: bytearray, step: int) -> bool:
        """Average the expected gradients; return False, with nothing changed, if some rank has others.

        Raises:
            DifferentStepsError: ranks are in different steps; on all ranks alike.
        """
        views = self._views(computed)
        if views is None:
            self._refuse()
        else:
            tag = self._tag(views[0].dtype, step)
            sent = (*views, tag)
            work = self._call.submit(self._engine, sent, sent)
            try:
                work.wait()
            except MismatchError:
                views = None  # the exchange by the mask finds a real mismatch again
        if views is None:
            self.close()
            return False
        if tag.tolist().count(0) != _TAGS - 1:
            steps = ", ".join(map(str, np.flatnonzero(tag)))
            raise DifferentStepsError(f"the ranks are in {steps} (modulo {_TAGS})")
        self._source.write_back(self._indices, self.expected_kinds)
        return True

    def close(self) -> None:
        """Exchange by the mask for longer than the last time."""
        self.open = False
        self._in_a_row = 0
        self._backoff = min(2 * self._backoff, _MOST_BACKOFF)

    def pause(self) -> None:
        """Exchange by the mask this time: ranks that do not want it are refused, and all close alike."""
        if self.open:
            self._refuse()
            self.close()

    def restart(self) -> None:
        """Forget what earlier exchanges have shown; on all ranks in the same exchange."""
        self._in_a_row, self._backoff = 0, _FIRST_BACKOFF

    def leave(self) -> None:
        """Leave the fast path; requests of ranks that still take it fail."""
        if self.open:
            self._refuse()

    def _views(self, computed: bytearray) -> tuple[Array, ...] | None:
        """Return views of the expected gradients; None if this rank has others."""
        if computed != self._computed:
            return None
        views = self._source.gradient_views(self._indices)
        if views is None and self._source.kinds(computed) == self.expected_kinds:
            views = self._source.buffers(self._indices, b"")
        return views

    def _tag(self, dtype: np.dtype[Any], step: int) -> Array:
        if dtype not in self._tags:
            kind = np.dtype(np.float32) if np.issubdtype(dtype, np.integer) else dtype  # compressed gradients
            self._tags[dtype] = [*np.eye(_TAGS, dtype=kind), np.empty(_TAGS, kind)]
        tags = self._tags[dtype]
        tags[-1][:] = tags[step % _TAGS]
        return tags[-1]

    def _refuse(self) -> None:
        message = "it computed other gradients than before; all ranks exchange masks now."
        self._call.refuse(self._engine, message)
