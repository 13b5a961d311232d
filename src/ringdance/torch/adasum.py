"""DistributedOptimizer with op=Adasum, which combines the weight changes of the ranks' local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ringdance.torch import _private
from ringdance.torch import operations as ops
from ringdance.torch._private import compiler_disable
from ringdance.torch.wrapped import Wrapped
from ringdance.training import session
from ringdance.training.exports import Adasum


class AdasumOptimizer(Wrapped):
    """Mixin for Adasum. Each rank takes a local step. Adasum then combines the weight changes of all ranks.

    State such as momentum is local to each rank. If a rank has no gradient for a parameter, the rank
    contributes a zero change, so Adasum uses only the changes of the other ranks.
    """

    def synchronize(self) -> None:
        """Do nothing, because the exchange is part of ``step()``."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, because the exchange is part of ``step()``."""
        raise AssertionError(
            "skip_synchronize() cannot be used with op=Adasum, because step() does the exchange. Remove the "
            "call."
        )

    @compiler_disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step, combine the weight changes of all ranks, and return the closure's value."""
        value = closure() if closure is not None else None
        self._add_new()
        compression = self._options.compression
        trained = [parameter for parameter in self._options.parameters if parameter.requires_grad]
        with torch.no_grad():
            starts = [parameter.detach().clone() for parameter in trained]
            super().step()  # type: ignore[misc]
            changes = [parameter - start for parameter, start in zip(trained, starts, strict=True)]
            packed = [compression.compress(change) for change in changes]
            small = [change.contiguous() for change, _ in packed]
            if small and session.is_initialized() and session.engine().size > 1:
                small = ops.grouped_allreduce_(small, name="adasum.changes", op=Adasum)
            for parameter, start, change, (_, context) in zip(trained, starts, small, packed, strict=True):
                parameter.copy_(start + compression.decompress(change, context))
        session.mark_step()
        return value

    _private.hooks_run_inside(step)
