"""The collective functions on torch tensors. Names, order of arguments and results: contract 2.1.1.

Differentiable forms go through ``ringdance.torch.autograd`` only if a gradient is wanted. Beyond Horovod:
bfloat16, uint8, int8, int16, unsigned and bool tensors everywhere; tensors that are not contiguous
(copied first) except in place, where they raise.

Longer than other files: every function has the many arguments that scripts give by place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringdance import session
from ringdance.core.request import Operation, Ticket
from ringdance.errors import ArgumentError
from ringdance.torch.compression import Compression
from ringdance.torch.memory import Array, array_of, check_in_place, from_array
from ringdance.training import handles, verbs
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id
from ringdance.training.verbs import pick_operation

Tensors = Sequence[Tensor]

Average = int(Operation.AVERAGE)
Sum = int(Operation.SUM)
Adasum = int(Operation.ADASUM)
Min = int(Operation.MIN)
Max = int(Operation.MAX)
Product = int(Operation.PRODUCT)


# How tensors go in and results come out.


def _views(tensors: Tensors) -> tuple[Array, ...]:
    return tuple([array_of(tensor) for tensor in tensors])


def _result(array: Array, like: Tensor) -> Tensor:
    tensor = from_array(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def _results(arrays: list[Array], like: Tensors) -> list[Tensor]:
    return [_result(array, tensor) for array, tensor in zip(arrays, like, strict=True)]


def _one(tensor: Tensor) -> Callable[[Ticket], Tensor]:
    return lambda ticket: _result(ticket.result[0], tensor)


def _many(tensors: Tensors) -> Callable[[Ticket], tuple[Tensor, ...]]:
    kept = list(tensors)
    return lambda ticket: tuple(_results(ticket.result, kept))


def _group(tensors: Tensors) -> list[Tensor]:
    group = list(tensors)
    if not group:
        raise IndexError("A group needs at least one tensor.")
    if any(one.is_cpu != group[0].is_cpu for one in group):
        raise verbs.UnsupportedOperationError("A group's tensors must all be on the CPU or all on a GPU.")
    return group


def wants_gradient(tensors: Tensors) -> bool:
    """Return whether the call has to be recorded for a backward pass."""
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def _recorded(function: Any, *arguments: Any) -> Any:
    """Call a function of ``ringdance.torch.autograd``, whose backward pass is recorded."""
    return function.apply(*arguments)


# Allreduce.


def submit_allreduce(
    tensors: Tensors, operation: Operation, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, *, grouped: bool = False, wake: bool = True,
) -> Ticket:
    """Submit out of place; the result is a list of arrays."""
    return verbs.allreduce(
        session.engine(), _views(tensors), None, name=name, operation=operation, prescale=prescale,
        postscale=postscale, set_id=set_id(process_set), grouped=grouped, wake=wake,
    )


def _submit_allreduce_(
    tensors: Tensors, operation: Operation, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, grouped: bool, wake: bool,
) -> Ticket:
    """Submit in place. For tensors on a GPU the pinned copies are reduced; ``_land`` copies them back."""
    for tensor in tensors:
        check_in_place(tensor)
    views = _views(tensors)
    return verbs.allreduce(
        session.engine(), views, views, name=name, operation=operation, prescale=prescale,
        postscale=postscale, set_id=set_id(process_set), grouped=grouped, wake=wake,
    )


def _land(tensors: Tensors, ticket: Ticket) -> None:
    """Copy results to where they belong, if that is not where they were reduced."""
    for tensor, array in zip(tensors, ticket.result, strict=True):
        if not tensor.is_cpu:
            tensor.detach().copy_(from_array(array))


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
    if compression is Compression.none:
        return _allreduce(tensor, operation, name, prescale_factor, postscale_factor, process_set)
    small, context = compression.compress(tensor)
    reduced = _allreduce(small, operation, name, prescale_factor, postscale_factor, process_set)
    restored: Tensor = compression.decompress(reduced, context)
    return restored


def _allreduce(
    tensor: Tensor, operation: Operation, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet,
) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        from ringdance.torch.autograd import Allreduce

        result: Tensor = _recorded(Allreduce, tensor, operation, name, prescale, postscale, process_set)
        return result
    ticket = submit_allreduce((tensor,), operation, name, prescale, postscale, process_set, wake=False)
    return _result(ticket.wait()[0], tensor)


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce``; ``synchronize`` of the returned handle gives the result."""
    operation = pick_operation(average, op)
    ticket = submit_allreduce((tensor,), operation, name, prescale_factor, postscale_factor, process_set)
    return handles.hold(ticket, _one(tensor))


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce ``tensor`` over all ranks in place and return it; not differentiable."""
    operation = pick_operation(average, op)
    check_in_place(tensor)
    views = (array_of(tensor),)
    ticket = verbs.allreduce(
        session.engine(), views, views, name=name, operation=operation, prescale=prescale_factor,
        postscale=postscale_factor, set_id=set_id(process_set), wake=False,
    )
    ticket.wait()
    if not tensor.is_cpu:
        _land((tensor,), ticket)
    return tensor


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce_``; returns a handle."""
    operation = pick_operation(average, op)
    check_in_place(tensor)
    views = (array_of(tensor),)
    ticket = verbs.allreduce(
        session.engine(), views, views, name=name, operation=operation, prescale=prescale_factor,
        postscale=postscale_factor, set_id=set_id(process_set),
    )

    def finish(done: Ticket) -> Tensor:
        if not tensor.is_cpu:
            _land((tensor,), done)
        return tensor

    return handles.hold(ticket, finish)


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors that are exchanged together; as ``allreduce``."""
    operation = pick_operation(average, op)
    group = _group(tensors)
    small, contexts = zip(*[compression.compress(tensor) for tensor in group], strict=True)
    if wants_gradient(small):
        from ringdance.torch.autograd import GroupedAllreduce

        reduced = _recorded(GroupedAllreduce,
            operation, name, prescale_factor, postscale_factor, process_set, *small
        )
    else:
        ticket = submit_allreduce(
            small, operation, name, prescale_factor, postscale_factor, process_set, grouped=True, wake=False
        )
        reduced = _results(ticket.wait(), small)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce``; ``synchronize`` gives a tuple."""
    operation = pick_operation(average, op)
    group = _group(tensors)
    ticket = submit_allreduce(
        group, operation, name, prescale_factor, postscale_factor, process_set, grouped=True
    )
    return handles.hold(ticket, _many(group))


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place, exchanged together, and return them."""
    operation = pick_operation(average, op)
    group = _group(tensors)
    ticket = _submit_allreduce_(
        group, operation, name, prescale_factor, postscale_factor, process_set, True, False
    )
    ticket.wait()
    _land(group, ticket)
    return group


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce_``; ``synchronize`` gives a tuple of the tensors."""
    operation = pick_operation(average, op)
    group = _group(tensors)
    ticket = _submit_allreduce_(
        group, operation, name, prescale_factor, postscale_factor, process_set, True, True
    )

    def finish(done: Ticket) -> tuple[Tensor, ...]:
        _land(group, done)
        return tuple(group)

    return handles.hold(ticket, finish)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to gather a sparse tensor's entries; the returned function waits and gives the sparse result.

    Equal indices of different ranks stay separate entries (``coalesce()`` sums them). With Average the
    values are divided by the number of ranks; any other ``op`` sums.
    """
    if not tensor.is_sparse:
        raise ArgumentError(f"sparse_allreduce_async needs a sparse tensor, got {tensor.type()}.")
    divide = pick_operation(None, op) is Operation.AVERAGE
    # Indices have one column for each entry: gathered as rows. Never .coalesce(): entries count as they are.
    plain = tensor.detach()
    rows = plain._indices().t().contiguous()
    values = plain._values().contiguous()
    base = None if name is None else str(name)
    first = allgather_async(rows, None if base is None else f"{base}.indices", process_set)
    second = allgather_async(values, None if base is None else f"{base}.values", process_set)

    def wait() -> Tensor:
        indices = synchronize(first)
        gathered = synchronize(second)
        if divide:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), gathered, plain.shape, check_invariants=False)

    return wait


# Allgather.


def submit_allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, *, grouped: bool = False, wake: bool = True
) -> Ticket:
    """Submit; the result is a list of arrays."""
    return verbs.allgather(
        session.engine(), _views(tensors), name=name, set_id=set_id(process_set), grouped=grouped, wake=wake
    )


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the ranks' tensors joined along dimension 0, which may differ between ranks; differentiable."""
    if tensor.dim() == 0:
        raise IndexError("allgather needs a tensor with at least one dimension; use tensor.reshape(1).")
    if wants_gradient((tensor,)):
        from ringdance.torch.autograd import Allgather

        result: Tensor = _recorded(Allgather, tensor, name, process_set)
        return result
    return _result(submit_allgather((tensor,), name, process_set, wake=False).wait()[0], tensor)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``allgather``; returns a handle."""
    return handles.hold(submit_allgather((tensor,), name, process_set), _one(tensor))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors together; as ``allgather``."""
    group = _group(tensors)
    if wants_gradient(group):
        from ringdance.torch.autograd import GroupedAllgather

        return list(_recorded(GroupedAllgather, name, process_set, *group))
    return _results(submit_allgather(group, name, process_set, grouped=True, wake=False).wait(), group)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``grouped_allgather``; ``synchronize`` gives a tuple."""
    group = _group(tensors)
    return handles.hold(submit_allgather(group, name, process_set, grouped=True), _many(group))


# Broadcast.


def submit_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool,
    wake: bool = True,
) -> Ticket:
    """Submit; the result is a list of one array."""
    if in_place:
        check_in_place(tensor)
    views = _views((tensor,))
    return verbs.broadcast(
        session.engine(), views, views if in_place else None, root_rank, name=name,
        set_id=set_id(process_set), wake=wake,
    )


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of global rank ``root_rank``; shape and type equal on all ranks; differentiable."""
    if wants_gradient((tensor,)):
        from ringdance.torch.autograd import Broadcast

        result: Tensor = _recorded(Broadcast, tensor, root_rank, name, process_set)
        return result
    return _result(
        submit_broadcast(tensor, root_rank, name, process_set, in_place=False, wake=False).wait()[0], tensor
    )


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast``; returns a handle."""
    return handles.hold(submit_broadcast(tensor, root_rank, name, process_set, in_place=False), _one(tensor))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite ``tensor`` with that of global rank ``root_rank`` and return it."""
    ticket = submit_broadcast(tensor, root_rank, name, process_set, in_place=True, wake=False)
    ticket.wait()
    _land((tensor,), ticket)
    return tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast_``; returns a handle."""
    ticket = submit_broadcast(tensor, root_rank, name, process_set, in_place=True)

    def finish(done: Ticket) -> Tensor:
        _land((tensor,), done)
        return tensor

    return handles.hold(ticket, finish)


# Alltoall.


def _splits_of(splits: Any) -> Array | None:
    """Return splits as an array; Horovod's types: a list or tuple of integers, or an int32 tensor."""
    if splits is None:
        return None
    if isinstance(splits, Tensor):
        if splits.dtype is not torch.int32:
            raise ArgumentError(f"splits must be a list or a tensor of type int32, got {splits.dtype}.")
        return splits.detach().cpu().numpy()
    return np.asarray(splits)


def submit_alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, wake: bool = True
) -> Ticket:
    """Submit; the result is a list of one array, with ``received_splits`` beside it."""
    return verbs.alltoall(
        session.engine(), _views((tensor,)), (_splits_of(splits),), name=name, set_id=set_id(process_set),
        wake=wake,
    )


def _received(ticket: Ticket, splits: Any) -> Tensor:
    assert ticket.received_splits is not None
    received = torch.from_numpy(ticket.received_splits[0].astype(np.int32))
    return received.to(splits.device) if isinstance(splits, Tensor) else received


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
    if wants_gradient((tensor,)):
        from ringdance.torch.autograd import Alltoall

        output, received = _recorded(Alltoall, tensor, splits, name, process_set)
    else:
        ticket = submit_alltoall(tensor, splits, name, process_set, wake=False)
        output, received = _result(ticket.wait()[0], tensor), _received(ticket, splits)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``alltoall``; ``synchronize`` gives (output, received_splits), with and without splits."""
    ticket = submit_alltoall(tensor, splits, name, process_set)
    return handles.hold(ticket, lambda done: (_result(done.result[0], tensor), _received(done, splits)))


# Reducescatter.


def submit_reducescatter(
    tensors: Tensors, operation: Operation, name: str | None, prescale: float, postscale: float,
    process_set: ProcessSet, *, grouped: bool = False, wake: bool = True,
) -> Ticket:
    """Submit; the result is a list of arrays."""
    return verbs.reducescatter(
        session.engine(), _views(tensors), name=name, operation=operation, prescale=prescale,
        postscale=postscale, set_id=set_id(process_set), grouped=grouped, wake=wake,
    )


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce (Average or Sum) and return this rank's rows: d // n of d, the first d % n ranks one more."""
    operation = pick_operation(None, op)
    small, context = compression.compress(tensor)
    if wants_gradient((small,)):
        from ringdance.torch.autograd import Reducescatter

        reduced = _recorded(
            Reducescatter, small, operation, name, prescale_factor, postscale_factor, process_set
        )
    else:
        ticket = submit_reducescatter(
            (small,), operation, name, prescale_factor, postscale_factor, process_set, wake=False
        )
        reduced = _result(ticket.wait()[0], small)
    restored: Tensor = compression.decompress(reduced, context)
    return restored


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``reducescatter``; returns a handle."""
    operation = pick_operation(None, op)
    ticket = submit_reducescatter((tensor,), operation, name, prescale_factor, postscale_factor, process_set)
    return handles.hold(ticket, _one(tensor))


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors together; as ``reducescatter``."""
    operation = pick_operation(None, op)
    group = _group(tensors)
    small, contexts = zip(*[compression.compress(tensor) for tensor in group], strict=True)
    if wants_gradient(small):
        from ringdance.torch.autograd import GroupedReducescatter

        reduced = _recorded(GroupedReducescatter,
            operation, name, prescale_factor, postscale_factor, process_set, *small
        )
    else:
        ticket = submit_reducescatter(
            small, operation, name, prescale_factor, postscale_factor, process_set, grouped=True, wake=False
        )
        reduced = _results(ticket.wait(), small)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``grouped_reducescatter``; ``synchronize`` gives a tuple."""
    operation = pick_operation(None, op)
    group = _group(tensors)
    ticket = submit_reducescatter(
        group, operation, name, prescale_factor, postscale_factor, process_set, grouped=True
    )
    return handles.hold(ticket, _many(group))


# The rest.


def join(device: int = -1) -> int:
    """Say that this rank has no more data; help the others with zeros until all have joined.

    Returns:
        The global rank that joined last, the same on all. ``device`` is accepted and without effect.
    """
    return verbs.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    verbs.barrier(session.engine(), set_id(process_set))


poll = handles.poll
synchronize = handles.synchronize
