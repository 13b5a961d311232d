"""The short way of an exchange of gradients: what is computed each time is sent at once, without a mask.

When several exchanges in a row have found that all ranks compute the same gradients, all take the short way:
each rank that has just these sends them, with a *tag* that holds the number of the step. If the request
goes through, all ranks had them. A rank that has others refuses the request instead; so everybody learns of
it, and all exchange by the mask, as if the short way had not been tried. Each time that happens they wait
longer before they try it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.training.collectives import Call
from ringdance.training.gradients import GradientSource

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

__all__ = ["DifferentStepsError", "Shortcut"]

Array = np.ndarray[Any, Any]

_TAGS = 8  # steps are told apart modulo this: small enough that a 16-bit float holds their squares exactly
_FIRST_PATIENCE, _MOST_PATIENCE = 2, 256


class DifferentStepsError(Exception):
    """The gradients that met belong to different steps."""


class Shortcut:
    """What this rank knows of the short way; ``open`` and ``usual`` are alike on all ranks.

    Args:
        engine: of this rank.
        set_id: process set.
        source: lends the gradients.
        name: of the exchange.
        scales: what multiplies before and after the sum of the average.

    Attributes:
        usual: the kinds of gradients agreed on last time, if none was sparse; else empty.
        open: whether the next exchange goes the short way.
    """

    def __init__(
        self, engine: Engine, set_id: int, source: GradientSource, name: str, scales: tuple[float, float]
    ) -> None:
        self.usual = b""
        self.open = False
        self._engine, self._source = engine, source
        self._call = Call(
            Collective.ALLREDUCE, f"{name}.usual", ReduceOp.AVERAGE, *scales, set_id, grouped=True
        )
        self._indices: tuple[int, ...] = ()
        self._computed = b""
        self._tags: dict[np.dtype[Any], Array] = {}
        self._in_a_row = 0
        self._patience = _FIRST_PATIENCE

    def learn(self, union: bytes, alike: bool, possible: bool) -> None:
        """Take in the outcome of an exchange by the mask.

        Args:
            union: the kinds of gradients that all ranks agreed on; empty if there were sparse ones.
            alike: whether each rank had just what was usual before.
            possible: whether this way of exchanging has a short form.
        """
        self._in_a_row = self._in_a_row + 1 if alike and union == self.usual else 0
        self.usual = union
        self.open = possible and any(union) and self._in_a_row >= self._patience
        if self.open:
            self._indices = tuple(index for index, kind in enumerate(union) if kind)
            self._computed = bytes(1 if kind else 0 for kind in union)

    def exchange(self, computed: bytearray, step: int) -> bool:
        """Average the usual gradients; return False if some rank has others: nothing has happened then.

        Raises:
            DifferentStepsError: ranks are in different steps.
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
                views = None  # what is truly wrong is found by the mask's exchange again
        if views is None:
            self.open = False
            self._in_a_row = 0
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            return False
        # The ratio of the sums of squares and of numbers; ranks that have joined have added zeros to both.
        number = step % _TAGS + 1
        if abs(float(tag[1]) - number * float(tag[0])) > 0.25 * float(tag[0]):
            raise DifferentStepsError
        self._source.put(self._indices, self.usual)
        return True

    def leave(self) -> None:
        """Take the short way no more; ranks that still try it are told."""
        if self.open:
            self._refuse()

    def _views(self, computed: bytearray) -> tuple[Array, ...] | None:
        """Return views of the usual gradients; None if this rank has others."""
        if computed != self._computed:
            return None
        views = self._source.lend(self._indices)
        if views is None and self._source.kinds(computed) == self.usual:
            views = self._source.take(self._indices, b"")
        return views

    def _tag(self, dtype: np.dtype[Any], step: int) -> Array:
        tag = self._tags.get(dtype)
        if tag is None:
            tag = self._tags[dtype] = np.empty(2, dtype)
        number = step % _TAGS + 1
        tag[0] = number
        tag[1] = number * number
        return tag

    def _refuse(self) -> None:
        self._call.refuse(self._engine, "it computed other gradients than usual; all ask for a mask now.")
