"""The blocking functions out of place, recorded for a backward pass if one is wanted. Contract 3.6.

Each function here takes the members of a group, or a single tensor as a tuple of one.
All ranks of the set have to run the backward pass. A named call's gradient has the name ``<name>.grad``,
an unnamed one's none: those have to come in the same order on all ranks, as the calls themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringdance import session
from ringdance.core.request import ReduceOp
from ringdance.torch import requests
from ringdance.torch._private import compiler_disable
from ringdance.torch.requests import Tensors, wants_gradient
from ringdance.training import collectives
from ringdance.training.process_sets import ProcessSet, set_id

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reducescatter"]


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def allreduce(
    tensors: Tensors, operation: ReduceOp, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, grouped: bool = False,
) -> Sequence[Tensor]:
    """Return what ``allreduce`` gives."""
    if wants_gradient(tensors):
        return _call(_Allreduce, (operation, name, prescale, postscale, process_set, grouped), *tensors)
    work = requests.submit_allreduce(tensors, operation, name, prescale, postscale, process_set, grouped)
    return requests.results(work.wait(), tensors)


def allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, grouped: bool = False
) -> Sequence[Tensor]:
    """Return what ``allgather`` gives."""
    if wants_gradient(tensors):
        return _call(_Allgather, (name, process_set, grouped), *tensors)
    return requests.results(requests.submit_allgather(tensors, name, process_set, grouped).wait(), tensors)


def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Return what ``broadcast`` gives."""
    if wants_gradient((tensor,)):
        return _call(_Broadcast, (root_rank, name, process_set), tensor)[0]
    work = requests.submit_broadcast(tensor, root_rank, name, process_set)
    return requests.result(work.wait()[0], tensor)


def alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> Sequence[Tensor]:
    """Return what was received, and how many rows from each member (int32)."""
    if wants_gradient((tensor,)):
        return _call(_Alltoall, (splits, name, process_set), tensor)
    work = requests.submit_alltoall(tensor, splits, name, process_set)
    return requests.result(work.wait()[0], tensor), requests.received_splits(work, splits)


def reducescatter(
    tensors: Tensors, operation: ReduceOp, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, grouped: bool = False,
) -> Sequence[Tensor]:
    """Return what ``reducescatter`` gives."""
    if wants_gradient(tensors):
        return _call(_Reducescatter, (operation, name, prescale, postscale, process_set, grouped), *tensors)
    work = requests.submit_reducescatter(
        tensors, operation, name, prescale, postscale, process_set, grouped
    )
    return requests.results(work.wait(), tensors)


def _call(function: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> Sequence[Tensor]:
    """Run one of the functions below; within it nothing is recorded, so it may call those above."""
    outcome: Sequence[Tensor] = function.apply(arguments, *tensors)
    return outcome


class _Allreduce(torch.autograd.Function):
    """The gradient is reduced the same way."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        return tuple(allreduce(tensors, *arguments))

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        operation, name, *others = ctx.arguments
        return None, *allreduce(gradients, operation, _of_gradient(name), *others)


class _Allgather(torch.autograd.Function):
    """The gradient is averaged over the ranks; this rank's rows are its part."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(allgather(tensors, *arguments))

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, process_set, grouped = ctx.arguments
        averaged = allreduce(
            gradients, ReduceOp.AVERAGE, _of_gradient(name), 1.0, 1.0, process_set, grouped
        )
        own = _own_rows(ctx.rows, process_set)
        return None, *[one[part] for one, part in zip(averaged, own, strict=True)]


def _own_rows(rows: list[int], process_set: ProcessSet) -> list[slice]:
    """Return which rows of each gathered tensor came from this rank, which gave ``rows[i]`` of tensor i."""
    engine = session.engine()
    counts = np.array([rows], np.int64)
    gathered = collectives.allgather(engine, (counts,), set_id=set_id(process_set), wake=False).wait()[0]
    place = process_set.rank() or 0
    before = gathered[:place].sum(axis=0)
    return [slice(int(start), int(start) + count) for start, count in zip(before, rows, strict=True)]


class _Broadcast(torch.autograd.Function):
    """The gradient is averaged over the ranks and belongs to the root; the others get zeros."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], tensor: Tensor) -> tuple[Tensor]:
        ctx.arguments = arguments
        return (broadcast(tensor, *arguments),)

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        root_rank, name, process_set = ctx.arguments
        (averaged,) = allreduce(gradients, ReduceOp.AVERAGE, _of_gradient(name), 1.0, 1.0, process_set)
        return None, averaged if session.engine().rank == root_rank else torch.zeros_like(averaged)


class _Alltoall(torch.autograd.Function):
    """The gradient goes back the way the rows came; rows that were not sent get zeros."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], tensor: Tensor) -> tuple[Tensor, Tensor]:
        output, received = alltoall(tensor, *arguments)
        _, name, process_set = arguments
        ctx.arguments = tensor.shape[0], received.cpu(), _of_gradient(name), process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, received, name, process_set = ctx.arguments
        returned, _ = alltoall(gradients[0], received, name, process_set)
        if returned.shape[0] < rows:
            rest = returned.new_zeros((rows - returned.shape[0], *returned.shape[1:]))
            returned = torch.cat([returned, rest])
        return None, returned


class _Reducescatter(torch.autograd.Function):
    """The ranks' gradients are gathered; for Sum they are multiplied by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        operation, name, prescale, postscale, process_set, grouped = arguments
        times = (process_set.size() or 1) if operation is ReduceOp.SUM else 1
        ctx.arguments = prescale * postscale * times, _of_gradient(name), process_set, grouped
        return tuple(reducescatter(tensors, *arguments))

    @staticmethod
    @compiler_disable
    def backward(ctx: Any, *gradients: Any) -> Any:
        scale, *others = ctx.arguments
        return None, *allgather([gradient * scale for gradient in gradients], *others)
