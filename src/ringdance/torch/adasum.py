"""The Adasum form of DistributedOptimizer: ranks combine how far each would move the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringdance import session
from ringdance.errors import ArgumentError
from ringdance.torch import operations as ops

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer:
    """Put in front of the optimizer's class: a step is made locally, and its changes are combined by Adasum.

    State (momentum and the like) stays each rank's own. A parameter without gradient on a rank has no
    change there, and Adasum then takes the others'.
    """

    _names: list[str]
    _parameters: list[Tensor]
    _compression: Any
    _passes: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted; gradients are summed locally until ``step()`` in any case."""
        if passes <= 0:
            raise ArgumentError(f"backward_passes_per_step must be at least 1, got {passes}.")
        self._passes = passes

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for before ``step()``."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise: the exchange is the step itself."""
        raise AssertionError("skip_synchronize() is of no use with op=Adasum: step() does the exchange.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step locally, combine the changes of the weights over all ranks, and return the closure's value."""
        value = closure() if closure is not None else None
        trained = [
            (name, parameter) for name, parameter in zip(self._names, self._parameters, strict=True)
            if parameter.requires_grad
        ]
        with torch.no_grad():
            starts = [parameter.detach().clone() for _, parameter in trained]
            super().step()  # type: ignore[misc]
            changes = [parameter - start for (_, parameter), start in zip(trained, starts, strict=True)]
            packed = [self._compression.compress(change) for change in changes]
            small = [one.contiguous() for one, _ in packed]
            if small and session.engine().size > 1:
                small = ops.grouped_allreduce_(small, name="adasum.changes", op=ops.Adasum)
            for (_, parameter), start, one, (_, context) in zip(trained, starts, small, packed, strict=True):
                parameter.copy_(start + self._compression.decompress(one, context))
        return value
