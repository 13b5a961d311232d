"""Convert torch tensors to requests and results to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringdance import session
from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.errors import ArgumentError
from ringdance.torch.memory import Array, array_of, from_array
from ringdance.training import collectives
from ringdance.training.process_sets import ProcessSet, set_id

__all__ = [
    "group_of", "land", "received_splits", "result", "results", "results_later", "submit_allgather",
    "submit_allreduce", "submit_alltoall", "submit_broadcast", "submit_reducescatter", "wants_gradient",
]

Tensors = Sequence[Tensor]


def group_of(tensors: Tensors) -> list[Tensor]:
    """Return the members of a group as a list.

    Raises:
        IndexError: there are none.
        UnsupportedOperationError: some are on the CPU, others on a GPU.
    """
    group = list(tensors)
    if not group:
        raise IndexError("A group needs at least one tensor.")
    if any([one.is_cpu != group[0].is_cpu for one in group]):
        raise collectives.UnsupportedOperationError(
            "A group's tensors must all be on the CPU or all on a GPU."
        )
    return group


def wants_gradient(tensors: Tensors) -> bool:
    """Return whether the call has to be recorded for a backward pass."""
    for tensor in tensors:
        if getattr(tensor, "requires_grad", False):
            return torch.is_grad_enabled()
    return False


# Results.


def result(array: Array, like: Tensor) -> Tensor:
    """Return an array that the engine has made as a tensor on the device of ``like``."""
    tensor = from_array(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def results(arrays: list[Array], like: Tensors) -> list[Tensor]:
    """Return ``result`` for each member of a group."""
    if len(like) == 1:
        return [result(arrays[0], like[0])]
    return [result(array, tensor) for array, tensor in zip(arrays, like, strict=True)]


def results_later(like: Tensors, grouped: bool) -> Callable[[Work], Tensor | tuple[Tensor, ...]]:
    """Return what makes the value of ``synchronize``: the tensor, or of a group a tuple."""
    if grouped:
        return lambda work: tuple(results(work.result, like))
    return lambda work: result(work.result[0], like[0])


def land(tensors: Tensors, work: Work) -> None:
    """After an operation in place: copy what was done in pinned memory back to the GPU."""
    for tensor, array in zip(tensors, work.result, strict=True):
        if not tensor.is_cpu:
            tensor.detach().copy_(from_array(array))


def received_splits(work: Work, splits: Any) -> Tensor:
    """Return how many rows came from each member, int32, on the device of ``splits`` if that is a tensor."""
    assert work.received_splits is not None
    received = torch.from_numpy(work.received_splits[0].astype(np.int32))
    return received.to(splits.device) if isinstance(splits, Tensor) else received


# Requests. ``wake=False`` is for callers that wait at once.


def _views(tensors: Tensors, in_place: bool = False) -> tuple[Array, ...]:
    if len(tensors) == 1:
        return (array_of(tensors[0], in_place),)
    return tuple([array_of(tensor, in_place) for tensor in tensors])


def _like(views: tuple[Array, ...]) -> tuple[Array, ...]:
    # Torch needs no more than NumPy's alignment; the engine's own arrays cost 2 µs more.
    if len(views) == 1:
        view = views[0]
        return (np.empty(view.shape, view.dtype),)
    return tuple([np.empty(view.shape, view.dtype) for view in views])


@collectives.refusing(Collective.ALLREDUCE)
def submit_allreduce(
    tensors: Tensors, operation: ReduceOp, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, grouped: bool = False, in_place: bool = False, wake: bool = False,
) -> Work:
    """Submit; the result is a list of arrays. ``in_place`` needs ``land`` afterwards."""
    views = _views(tensors, in_place)
    return collectives.allreduce(
        session.engine(), views, views if in_place else _like(views), name=name, operation=operation,
        prescale=prescale, postscale=postscale, set_id=set_id(process_set), grouped=grouped, wake=wake,
    )


@collectives.refusing(Collective.ALLGATHER)
def submit_allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, grouped: bool = False, wake: bool = False
) -> Work:
    """Submit; the result is a list of arrays."""
    return collectives.allgather(
        session.engine(), _views(tensors), name=name, set_id=set_id(process_set), grouped=grouped, wake=wake
    )


@collectives.refusing(Collective.BROADCAST)
def submit_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool = False,
    wake: bool = False,
) -> Work:
    """Submit; the result is a list of one array. ``in_place`` needs ``land`` afterwards."""
    views = _views((tensor,), in_place)
    return collectives.broadcast(
        session.engine(), views, views if in_place else _like(views), root_rank, name=name,
        set_id=set_id(process_set), wake=wake,
    )


def _splits_of(splits: Any) -> Array | None:
    """Return splits as an array; Horovod's types: a list or tuple of integers, or an int32 tensor."""
    if splits is None:
        return None
    if isinstance(splits, Tensor):
        if splits.dtype is not torch.int32:
            raise ArgumentError(f"splits must be a list or a tensor of type int32, got {splits.dtype}.")
        return splits.detach().cpu().numpy()
    return np.asarray(splits)


@collectives.refusing(Collective.ALLTOALL)
def submit_alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, wake: bool = False
) -> Work:
    """Submit; the result is a list of one array, with ``received_splits`` beside it."""
    return collectives.alltoall(
        session.engine(), _views((tensor,)), (_splits_of(splits),), name=name, set_id=set_id(process_set),
        wake=wake,
    )


@collectives.refusing(Collective.REDUCESCATTER)
def submit_reducescatter(
    tensors: Tensors, operation: ReduceOp, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, grouped: bool = False, wake: bool = False,
) -> Work:
    """Submit; the result is a list of arrays."""
    return collectives.reducescatter(
        session.engine(), _views(tensors), name=name, operation=operation, prescale=prescale,
        postscale=postscale, set_id=set_id(process_set), grouped=grouped, wake=wake,
    )
