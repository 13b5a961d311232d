"""The collective functions on torch tensors, with Horovod's names, order of arguments and results.

Beyond Horovod: bfloat16, uint8, int8, int16, unsigned, complex and bool tensors everywhere; tensors that are
not contiguous (copied first) except in place, where they raise.

``allreduce`` describes the arguments of all: ``name`` is the key that matches the ranks' calls (without
one they match by order), ``process_set`` the ranks that take part, and errors are of the same kinds. Forms
with ``_async`` return a handle at once, for ``poll`` and ``synchronize``; forms that end in ``_`` write into
their argument and are not differentiable; ``grouped_`` forms exchange several tensors together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdance.core import labels
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError
from ringdance.torch._private import compiler_disable, sparse_entries
from ringdance.torch.exchange import Tensors, run, run_in_place, start
from ringdance.torch.memory import Compression, block_of, sample_of
from ringdance.training import collectives, session
from ringdance.training.checks import pick_operation
from ringdance.training.collectives import allreduce_call, movement, reducescatter_call
from ringdance.training.exports import Average
from ringdance.training.gradients import weights
from ringdance.training.handles import poll, synchronize
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "sparse_allreduce_async", "synchronize",
]


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
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,), compression)[0]


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce``; ``synchronize`` of the returned handle gives the result."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return start(call, (tensor,))


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce ``tensor`` over all ranks in place and return it."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return run_in_place(call, (tensor,))[0]


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce_``; ``synchronize`` gives the tensor."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return start(call, (tensor,), in_place=True)


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors; as ``allreduce``."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors, compression)


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce``; ``synchronize`` gives a tuple."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors)


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place and return them."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return run_in_place(call, tensors)


@compiler_disable
def reduce_gradients(
    tensors: Tensors, name: str, op: int, prescale: float, postscale: float, process_set: ProcessSet,
    pattern: str, parameters: Sequence[str] = (),
) -> list[Tensor]:
    """Reduce all gradients of a step, which ends with it; results may use the memory of the inputs.

    ``parameters``: their names, for messages.
    """
    labels.note(f"grouped_allreduce.{name}", name, "gradients", parameters)
    call = allreduce_call(name, None, op, prescale, postscale, process_set, True, pattern=pattern)
    reduced: list[Tensor] = run_in_place(call, [*map(block_of, tensors)])
    session.mark_step()
    return reduced


@compiler_disable
def compare_weights(
    tensors: Tensors, names: Sequence[str], exchange: str, advice: str, process_set: ProcessSet
) -> None:
    """Compare the parameters of an exchange of gradients over the ranks if that is due: see ``weights``."""
    weights.compare_if_due(exchange, names, advice, set_id(process_set), lambda: sample_of(tensors))


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce_``; ``synchronize`` gives a tuple of the tensors."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors, in_place=True)


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
    # Indices have one column for each entry: gathered as rows.
    indices, values = sparse_entries(tensor)
    first = allgather_async(indices.t().contiguous(), name and f"{name}.indices", process_set)
    second = allgather_async(values.contiguous(), name and f"{name}.values", process_set)

    def wait() -> Tensor:
        indices = synchronize(first)
        gathered = synchronize(second)
        if divide:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), gathered, tensor.shape, check_invariants=False)

    return wait


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the ranks' tensors joined along dimension 0, which may differ between ranks; differentiable."""
    call = movement(Collective.ALLGATHER, name, process_set)
    if isinstance(tensor, Tensor) and tensor.dim() == 0:
        error = IndexError("allgather needs a tensor with at least one dimension; use tensor.reshape(1).")
        call.refuse(session.engine(), error)
        raise error
    return run(call, (tensor,))[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``allgather``; returns a handle."""
    return start(movement(Collective.ALLGATHER, name, process_set), (tensor,))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors; as ``allgather``."""
    return run(movement(Collective.ALLGATHER, name, process_set, True), tensors)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``grouped_allgather``; ``synchronize`` gives a tuple."""
    return start(movement(Collective.ALLGATHER, name, process_set, True), tensors)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of global rank ``root_rank``; shape and type equal on all ranks; differentiable."""
    return run(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast``; returns a handle."""
    return start(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite ``tensor`` with that of global rank ``root_rank`` and return it."""
    return run_in_place(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))[0]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast_``; returns a handle."""
    return start(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,), in_place=True)


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
    output, received = run(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits=splits)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``alltoall``; ``synchronize`` gives (output, received_splits), with and without splits."""
    return start(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits=splits)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce (Average or Sum) and return this rank's rows: d // n of d, the first d % n ranks one more."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,), compression)[0]


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``reducescatter``; returns a handle."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return start(call, (tensor,))


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors; as ``reducescatter``."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors, compression)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``grouped_reducescatter``; ``synchronize`` gives a tuple."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors)


def join(device: int = -1) -> int:
    """Help the other ranks with zeros until all have joined.

    Returns:
        The global rank that joined last, the same on all. ``device`` is accepted and without effect.
    """
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    collectives.barrier(session.engine(), set_id(process_set))


# Users get each function so that torch.compile calls it as it is.
globals().update({name: compiler_disable(globals()[name]) for name in __all__})
