"""The fast path for exchanging gradients, without a mask, while all ranks compute the same gradients.

After several exchanges in a row in which all ranks computed the same gradients, all ranks take the fast path.
Each rank that has exactly these gradients sends them, with a *tag* that shows the step number. If the request
succeeds, all ranks had the same gradients. A rank with different gradients refuses the request, which
makes it fail on all ranks. They then use the mask instead. Each time that happens, they wait for more steps
before they try again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringdance.core.engine import Engine
from ringdance.errors import MismatchError
from ringdance.training.collectives import Array, Call
from ringdance.training.gradients.mask import DifferentStepsError
from ringdance.training.gradients.source import AS_DENSE, GradientSource

# Step numbers are compared modulo _TAGS. A tag has one element per step number: 1 for the rank's step, 0 for
# the others. In the average, an element is positive if any rank is in that step, in any floating-point dtype
# and for any number of ranks. Joined ranks add zeros.
_TAGS = 8
_FIRST_BACKOFF, _MOST_BACKOFF = 2, 256


class FastPath:
    """Exchanges the expected gradients without a mask, and decides when all ranks do so.

    The result of ``update`` and the value of ``expected_kinds`` are equal on all ranks.

    Thread: exchanging, or script when parameters are added.

    Args:
        engine: Engine of this rank.
        source: Access to the gradients.
        call: Call that has the name, process set, operation and scales of the exchange.

    Attributes:
        expected_kinds: Kinds of the gradients agreed on last, or empty if one was sparse.
    """

    def __init__(self, engine: Engine, source: GradientSource, call: Call) -> None:
        self.expected_kinds = b""
        self._engine = engine
        self._source = source
        self._call = call.but(name=f"{call.name}.expected")
        self._indices: tuple[int, ...] = ()
        self._computed = b""
        self._tags: dict[np.dtype[Any], list[Array]] = {}  # One tag per step number, then the buffer to send.
        self._in_a_row = 0
        self._backoff = _FIRST_BACKOFF

    def update(self, union: bytes, alike: bool, possible: bool) -> bool:
        """Record the outcome of an exchange by the mask. Return True if the next one does not need a mask.

        Args:
            union: Kinds of gradients that all ranks agreed on.
            alike: True if each rank had exactly the expected gradients.
            possible: True if this kind of exchange has a fast path.
        """
        if any(0 < kind < AS_DENSE for kind in union):
            union = b""
        self._in_a_row = self._in_a_row + 1 if alike and union == self.expected_kinds else 0
        self.expected_kinds = union
        ready = possible and any(union) and self._in_a_row >= self._backoff
        if ready:
            self._indices = tuple(index for index, kind in enumerate(union) if kind)
            self._computed = bytes(1 if kind else 0 for kind in union)
        return ready

    def exchange(self, computed: bytearray, step: int) -> bool:
        """Average the expected gradients. If a rank has different ones, change nothing and return False.

        Raises:
            DifferentStepsError: Ranks are at different steps. Raised on all ranks.
        """
        views = self._views(computed)
        if views is None:
            self.refuse()
            return False
        tag = self._tag(views[0].dtype, step)
        sent = (*views, tag)
        work = self._call.submit(self._engine, sent, sent)
        try:
            work.wait()
        except MismatchError:
            return False  # A real mismatch will also occur in the exchange by the mask.
        if tag.tolist().count(0) != _TAGS - 1:
            steps = ", ".join(map(str, np.flatnonzero(tag)))
            raise DifferentStepsError(f"ranks are at different steps: {steps} (modulo {_TAGS})")
        self._source.write_back(self._indices, self.expected_kinds)
        return True

    def refuse(self) -> None:
        """Make the exchange without a mask fail on the ranks that attempt it."""
        self._call.refuse(self._engine, "it computed different gradients than in the previous steps.")

    def back_off(self) -> None:
        """Require more exchanges by the mask than last time before the next attempt."""
        self._in_a_row = 0
        self._backoff = min(2 * self._backoff, _MOST_BACKOFF)

    def restart(self) -> None:
        """Discard the results of earlier exchanges. All ranks call this in the same exchange."""
        self._in_a_row = 0
        self._backoff = _FIRST_BACKOFF

    def _views(self, computed: bytearray) -> tuple[Array, ...] | None:
        """Return views of the expected gradients, or None if this rank has different gradients."""
        if computed != self._computed:
            return None
        views = self._source.gradient_views(self._indices)
        if views is None and self._source.kinds(computed) == self.expected_kinds:
            views = self._source.buffers(self._indices, b"")
        return views

    def _tag(self, dtype: np.dtype[Any], step: int) -> Array:
        if dtype not in self._tags:
            # Compressed gradients may be integers, but the average of the tags needs fractions.
            kind = np.dtype(np.float32) if np.issubdtype(dtype, np.integer) else dtype
            self._tags[dtype] = [*np.eye(_TAGS, dtype=kind), np.empty(_TAGS, kind)]
        tags = self._tags[dtype]
        tags[-1][:] = tags[step % _TAGS]
        return tags[-1]
