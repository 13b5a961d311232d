"""Gradients of the collective functions. Contract 3.6.

All ranks of the set have to run the backward pass. A named call's gradient has the name ``<name>.grad``,
an unnamed one's none: those have to come in the same order on all ranks, as the calls themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringdance import session
from ringdance.core.request import Operation
from ringdance.torch import operations as ops
from ringdance.training import verbs
from ringdance.training.process_sets import ProcessSet, set_id

__all__ = [
    "Allgather", "Allreduce", "Alltoall", "Broadcast", "GroupedAllgather", "GroupedAllreduce",
    "GroupedReducescatter", "Reducescatter",
]


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


class Allreduce(torch.autograd.Function):
    """The gradient is reduced the same way."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, operation: Operation, name: str | None, prescale: float, postscale: float,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.arguments = operation, _of_gradient(name), prescale, postscale, process_set
        ticket = ops.submit_allreduce(
            (tensor,), operation, name, prescale, postscale, process_set, wake=False
        )
        return ops._result(ticket.wait()[0], tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = ops._allreduce(gradients[0], *ctx.arguments)
        return reduced, None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """The gradients are reduced the same way, as a group."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, name: str | None, prescale: float, postscale: float,
        process_set: ProcessSet, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = operation, name, prescale, postscale, process_set
        ticket = ops.submit_allreduce(
            tensors, operation, name, prescale, postscale, process_set, grouped=True, wake=False
        )
        return tuple(ops._results(ticket.wait(), tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operation, name, prescale, postscale, process_set = ctx.arguments
        reduced = ops.grouped_allreduce(
            gradients, None, _of_gradient(name), op=operation, prescale_factor=prescale,
            postscale_factor=postscale, process_set=process_set,
        )
        return None, None, None, None, None, *reduced


def _own_rows(rows: list[int], process_set: ProcessSet) -> list[slice]:
    """Return which rows of each gathered tensor came from this rank, which gave ``rows[i]`` of tensor i."""
    engine = session.engine()
    counts = np.array([rows], np.int64)
    gathered = verbs.allgather(engine, (counts,), set_id=set_id(process_set), wake=False).wait()[0]
    place = process_set.rank() or 0
    before = gathered[:place].sum(axis=0)
    return [slice(int(start), int(start) + count) for start, count in zip(before, rows, strict=True)]


class Allgather(torch.autograd.Function):
    """The gradient is averaged over the ranks; this rank's rows are its part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.arguments = tensor.shape[0], _of_gradient(name), process_set
        return ops._result(ops.submit_allgather((tensor,), name, process_set, wake=False).wait()[0], tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, name, process_set = ctx.arguments
        averaged = ops._allreduce(gradients[0], Operation.AVERAGE, name, 1.0, 1.0, process_set)
        return averaged[_own_rows([rows], process_set)[0]], None, None


class GroupedAllgather(torch.autograd.Function):
    """As Allgather, for each member."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = [tensor.shape[0] for tensor in tensors], _of_gradient(name), process_set
        ticket = ops.submit_allgather(tensors, name, process_set, grouped=True, wake=False)
        return tuple(ops._results(ticket.wait(), tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, name, process_set = ctx.arguments
        averaged = ops.grouped_allreduce(gradients, None, name, op=ops.Average, process_set=process_set)
        own = _own_rows(rows, process_set)
        return None, None, *[one[part] for one, part in zip(averaged, own, strict=True)]


class Broadcast(torch.autograd.Function):
    """The gradient is averaged over the ranks and belongs to the root; the others get zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.arguments = root_rank, _of_gradient(name), process_set
        ticket = ops.submit_broadcast(tensor, root_rank, name, process_set, in_place=False, wake=False)
        return ops._result(ticket.wait()[0], tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        root_rank, name, process_set = ctx.arguments
        averaged = ops._allreduce(gradients[0], Operation.AVERAGE, name, 1.0, 1.0, process_set)
        own = averaged if session.engine().rank == root_rank else torch.zeros_like(averaged)
        return own, None, None, None


class Alltoall(torch.autograd.Function):
    """The gradient goes back the way the rows came; rows that were not sent get zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        ticket = ops.submit_alltoall(tensor, splits, name, process_set, wake=False)
        output = ops._result(ticket.wait()[0], tensor)
        received = ops._received(ticket, splits)
        ctx.arguments = tensor.shape[0], received.cpu(), _of_gradient(name), process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, received, name, process_set = ctx.arguments
        returned, _ = ops.alltoall(gradients[0], received, name, process_set)
        if returned.shape[0] < rows:
            rest = returned.new_zeros((rows - returned.shape[0], *returned.shape[1:]))
            returned = torch.cat([returned, rest])
        return returned, None, None, None


def _scatter_scale(operation: Operation, prescale: float, postscale: float, process_set: ProcessSet) -> float:
    size = process_set.size() or 1
    return prescale * postscale * (size if operation is Operation.SUM else 1)


class Reducescatter(torch.autograd.Function):
    """The ranks' gradients are gathered; for Sum they are multiplied by the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, operation: Operation, name: str | None, prescale: float, postscale: float,
        process_set: ProcessSet,
    ) -> Tensor:
        scale = _scatter_scale(operation, prescale, postscale, process_set)
        ctx.arguments = scale, _of_gradient(name), process_set
        ticket = ops.submit_reducescatter(
            (tensor,), operation, name, prescale, postscale, process_set, wake=False
        )
        return ops._result(ticket.wait()[0], tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scale, name, process_set = ctx.arguments
        return ops.allgather(gradients[0] * scale, name, process_set), None, None, None, None, None


class GroupedReducescatter(torch.autograd.Function):
    """As Reducescatter, for each member."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, name: str | None, prescale: float, postscale: float,
        process_set: ProcessSet, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        scale = _scatter_scale(operation, prescale, postscale, process_set)
        ctx.arguments = scale, _of_gradient(name), process_set
        ticket = ops.submit_reducescatter(
            tensors, operation, name, prescale, postscale, process_set, grouped=True, wake=False
        )
        return tuple(ops._results(ticket.wait(), tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scale, name, process_set = ctx.arguments
        gathered = ops.grouped_allgather([gradient * scale for gradient in gradients], name, process_set)
        return None, None, None, None, None, *gathered
