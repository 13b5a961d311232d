"""The collective functions on torch tensors. Names, order of arguments and results: contract 2.1.1.

Beyond Horovod: bfloat16, uint8, int8, int16, unsigned and bool tensors everywhere; tensors that are not
contiguous (copied first) except in place, where they raise.

What is told about ``allreduce`` holds for all: ``name`` is the key that matches the ranks' calls (without
one they match by order), ``process_set`` the ranks that take part, and errors are of the same kinds. Forms
with ``_async`` return a handle at once, for ``poll`` and ``synchronize``; forms that end in ``_`` write into
their argument and are not differentiable; ``grouped_`` forms exchange several tensors together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringdance import session
from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.errors import ArgumentError
from ringdance.torch import autograd
from ringdance.torch._private import compiler_disable
from ringdance.torch.compression import Compression
from ringdance.torch.requests import (
    Tensors,
    group_of,
    land,
    received_splits,
    result,
    results_later,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_broadcast,
    submit_reducescatter,
)
from ringdance.training import collectives, handles
from ringdance.training.collectives import pick_operation
from ringdance.training.handles import poll, synchronize
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "poll", "reducescatter",
    "reducescatter_async", "sparse_allreduce_async", "synchronize",
]

Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of ``tensor`` over all ranks: same shape and type, differentiable.

    Args:
        tensor: equal shape and type on all ranks.
        average: old form of ``op``: True is Average, False is Sum.
        name: key that matches the ranks' calls; without one they match by order.
        compression: ``Compression.none``, ``.fp16``, ``.bf16`` or an object with compress and decompress.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the input of each rank.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Raises:
        ValueError: an argument is wrong; only this rank may see it.
        MismatchError: ranks called it with different shapes, types or operations; raised on all.
    """
    operation = pick_operation(average, op)
    arguments = operation, name, prescale_factor, postscale_factor, process_set
    if compression is Compression.none:
        return autograd.allreduce((tensor,), *arguments)[0]
    small, context = compression.compress(tensor)
    restored: Tensor = compression.decompress(autograd.allreduce((small,), *arguments)[0], context)
    return restored


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce``; ``synchronize`` of the returned handle gives the result."""
    operation = pick_operation(average, op)
    work = submit_allreduce(
        (tensor,), operation, name, prescale_factor, postscale_factor, process_set, wake=True
    )
    return handles.hold(work, results_later((tensor,), False))


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce ``tensor`` over all ranks in place and return it."""
    operation = pick_operation(average, op)
    work = submit_allreduce(
        (tensor,), operation, name, prescale_factor, postscale_factor, process_set, in_place=True
    )
    work.wait()
    if not tensor.is_cpu:
        land((tensor,), work)
    return tensor


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce_``; ``synchronize`` gives the tensor."""
    operation = pick_operation(average, op)
    work = submit_allreduce(
        (tensor,), operation, name, prescale_factor, postscale_factor, process_set, in_place=True, wake=True
    )
    return handles.hold(work, _landed(tensor))


def _landed(tensor: Tensor) -> Callable[[Work], Tensor]:
    def finish(work: Work) -> Tensor:
        if not tensor.is_cpu:
            land((tensor,), work)
        return tensor

    return finish


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors; as ``allreduce``."""
    operation = pick_operation(average, op)
    small, contexts = _compressed(tensors, compression)
    reduced = autograd.allreduce(
        small, operation, name, prescale_factor, postscale_factor, process_set, grouped=True
    )
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def _compressed(tensors: Tensors, compression: Any) -> tuple[list[Tensor], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in group_of(tensors)]
    return [small for small, _ in pairs], [context for _, context in pairs]


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce``; ``synchronize`` gives a tuple."""
    operation = pick_operation(average, op)
    group = group_of(tensors)
    work = submit_allreduce(
        group, operation, name, prescale_factor, postscale_factor, process_set, grouped=True, wake=True
    )
    return handles.hold(work, results_later(group, True))


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place and return them."""
    operation = pick_operation(average, op)
    group = group_of(tensors)
    work = submit_allreduce(
        group, operation, name, prescale_factor, postscale_factor, process_set, grouped=True, in_place=True
    )
    work.wait()
    land(group, work)
    return group


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce_``; ``synchronize`` gives a tuple of the tensors."""
    operation = pick_operation(average, op)
    group = group_of(tensors)
    work = submit_allreduce(
        group, operation, name, prescale_factor, postscale_factor, process_set, grouped=True, in_place=True,
        wake=True,
    )

    def finish(done: Work) -> tuple[Tensor, ...]:
        land(group, done)
        return tuple(group)

    return handles.hold(work, finish)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to gather a sparse tensor's entries; the returned function waits and gives the sparse result.

    Equal indices of different ranks stay separate entries (``coalesce()`` sums them). With Average the
    values are divided by the number of ranks; any other ``op`` sums.
    """
    if not tensor.is_sparse:
        raise ArgumentError(f"sparse_allreduce_async needs a sparse tensor, got {tensor.type()}.")
    divide = pick_operation(None, op) is ReduceOp.AVERAGE
    # Indices have one column for each entry: gathered as rows. Never .coalesce(): entries count as they are.
    plain = tensor.detach()
    rows = plain._indices().t().contiguous()
    values = plain._values().contiguous()
    first = allgather_async(rows, None if name is None else f"{name}.indices", process_set)
    second = allgather_async(values, None if name is None else f"{name}.values", process_set)

    def wait() -> Tensor:
        indices = synchronize(first)
        gathered = synchronize(second)
        if divide:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), gathered, plain.shape, check_invariants=False)

    return wait


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the ranks' tensors joined along dimension 0, which may differ between ranks; differentiable."""
    if tensor.dim() == 0:
        raise IndexError("allgather needs a tensor with at least one dimension; use tensor.reshape(1).")
    return autograd.allgather((tensor,), name, process_set)[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``allgather``; returns a handle."""
    work = submit_allgather((tensor,), name, process_set, wake=True)
    return handles.hold(work, results_later((tensor,), False))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors; as ``allgather``."""
    return list(autograd.allgather(group_of(tensors), name, process_set, grouped=True))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``grouped_allgather``; ``synchronize`` gives a tuple."""
    group = group_of(tensors)
    work = submit_allgather(group, name, process_set, grouped=True, wake=True)
    return handles.hold(work, results_later(group, True))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of global rank ``root_rank``; shape and type equal on all ranks; differentiable."""
    return autograd.broadcast(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast``; returns a handle."""
    work = submit_broadcast(tensor, root_rank, name, process_set, wake=True)
    return handles.hold(work, results_later((tensor,), False))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite ``tensor`` with that of global rank ``root_rank`` and return it."""
    work = submit_broadcast(tensor, root_rank, name, process_set, in_place=True)
    work.wait()
    land((tensor,), work)
    return tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast_``; returns a handle."""
    work = submit_broadcast(tensor, root_rank, name, process_set, in_place=True, wake=True)
    return handles.hold(work, _landed(tensor))


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor | tuple[Tensor, Tensor]:
    """Send ``splits[j]`` rows to rank j of the set, receive theirs in rank order; differentiable.

    Args:
        tensor: at least one dimension; all but the first equal on all ranks.
        splits: a list or an int32 tensor, one number for each rank; their sum may be less than the rows.
            Without it all ranks get equally many.
        name: key that matches the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        The received rows; with ``splits`` also how many came from each rank (int32).
    """
    output, received = autograd.alltoall(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``alltoall``; ``synchronize`` gives (output, received_splits), with and without splits."""
    work = submit_alltoall(tensor, splits, name, process_set, wake=True)
    return handles.hold(work, lambda done: (result(done.result[0], tensor), received_splits(done, splits)))


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce (Average or Sum) and return this rank's rows: d // n of d, the first d % n ranks one more."""
    operation = pick_operation(None, op)
    small, context = compression.compress(tensor)
    (reduced,) = autograd.reducescatter(
        (small,), operation, name, prescale_factor, postscale_factor, process_set
    )
    restored: Tensor = compression.decompress(reduced, context)
    return restored


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``reducescatter``; returns a handle."""
    operation = pick_operation(None, op)
    work = submit_reducescatter(
        (tensor,), operation, name, prescale_factor, postscale_factor, process_set, wake=True
    )
    return handles.hold(work, results_later((tensor,), False))


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors; as ``reducescatter``."""
    operation = pick_operation(None, op)
    small, contexts = _compressed(tensors, compression)
    reduced = autograd.reducescatter(
        small, operation, name, prescale_factor, postscale_factor, process_set, grouped=True
    )
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``grouped_reducescatter``; ``synchronize`` gives a tuple."""
    operation = pick_operation(None, op)
    group = group_of(tensors)
    work = submit_reducescatter(
        group, operation, name, prescale_factor, postscale_factor, process_set, grouped=True, wake=True
    )
    return handles.hold(work, results_later(group, True))


def join(device: int = -1) -> int:
    """Say that this rank has no more data; help the others with zeros until all have joined.

    Returns:
        The global rank that joined last, the same on all. ``device`` is accepted and without effect.
    """
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    collectives.barrier(session.engine(), set_id(process_set))


def _public(name: str) -> Any:
    """Return a function as users get it: it leaves a compiled graph, and peers are told of its errors."""
    function = globals()[name]
    kind = name.removeprefix("grouped_").removesuffix("_").removesuffix("_async").upper()
    if kind in Collective.__members__ and "name" in inspect.signature(function).parameters:
        function = collectives.refusing(Collective[kind], grouped=name.startswith("grouped_"))(function)
    return compiler_disable(function)


globals().update({name: _public(name) for name in __all__ if name[0].islower()})
