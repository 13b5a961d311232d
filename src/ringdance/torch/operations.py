"""The collective functions on torch tensors, with Horovod's names, argument order and results.

Beyond Horovod: all functions accept bfloat16, uint8, int8, int16, unsigned, complex and bool tensors.
Tensors that are not contiguous are copied first, except in place, where they raise.

``allreduce`` describes the arguments of all functions: ``name`` is the key that matches the ranks' calls
(without it they match by order), ``process_set`` the ranks that make the call. Errors are of the same kinds.
Forms with ``_async`` return a handle at once, for ``poll`` and ``synchronize``. Forms that end in ``_``
write into their argument and are not differentiable. ``grouped_`` forms exchange several tensors together.
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
    """Return the reduction of ``tensor`` over all ranks. Same shape and type, differentiable.

    Args:
        tensor: Tensor of equal shape and type on all ranks.
        average: Old form of ``op``. True means Average, False means Sum.
        name: Key that matches the ranks' calls. Without it they match by order.
        compression: ``Compression.none``, ``.fp16``, ``.bf16`` or an object with compress and decompress.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor for each rank's input.
        postscale_factor: Factor for the result.
        process_set: Ranks that make the call.

    Raises:
        ValueError: An argument is wrong. Possibly only this rank can see it.
        MismatchError: Ranks passed different shapes, types or operations. Raised on all ranks.
    """
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,), compression)[0]


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce``. ``synchronize`` on the returned handle gives the result."""
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
    """Start an ``allreduce_``. ``synchronize`` gives the tensor."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return start(call, (tensor,), in_place=True)


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors. Works like ``allreduce``."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors, compression)


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce``. ``synchronize`` gives a tuple."""
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
    """Reduce all gradients of a step, and end the step. Results may use the memory of the inputs.

    ``parameters``: Their names, for messages.
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
    """Compare the parameters of a gradient exchange over the ranks, if that is due. See ``weights``."""
    weights.compare_if_due(exchange, names, advice, set_id(process_set), lambda: sample_of(tensors))


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce_``. ``synchronize`` gives a tuple of the tensors."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors, in_place=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to gather a sparse tensor's entries. The returned function waits and returns a sparse tensor.

    Equal indices of different ranks stay separate entries (``coalesce()`` sums them). With Average, the
    values are divided by the number of ranks. Any other ``op`` sums.
    """
    if not tensor.is_sparse:
        raise ArgumentError(f"sparse_allreduce_async needs a sparse tensor, got {tensor.type()}.")
    divide = pick_operation(None, op) is ReduceOp.AVERAGE
    # Indices have one column for each entry. They are gathered as rows.
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
    """Return the ranks' tensors joined along dimension 0, whose size may differ by rank; differentiable."""
    call = movement(Collective.ALLGATHER, name, process_set)
    if isinstance(tensor, Tensor) and tensor.dim() == 0:
        error = IndexError("allgather needs a tensor with at least one dimension. Use tensor.reshape(1).")
        call.refuse(session.engine(), error)
        raise error
    return run(call, (tensor,))[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``allgather``. Returns a handle."""
    return start(movement(Collective.ALLGATHER, name, process_set), (tensor,))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors. Works like ``allgather``."""
    return run(movement(Collective.ALLGATHER, name, process_set, True), tensors)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``grouped_allgather``. ``synchronize`` gives a tuple."""
    return start(movement(Collective.ALLGATHER, name, process_set, True), tensors)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of global rank ``root_rank``. Shape and type equal on all ranks; differentiable."""
    return run(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast``. Returns a handle."""
    return start(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite ``tensor`` with the tensor of global rank ``root_rank``, and return it."""
    return run_in_place(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))[0]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast_``. Returns a handle."""
    return start(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,), in_place=True)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor | tuple[Tensor, Tensor]:
    """Send ``splits[j]`` rows to rank j of the set. Receive rows in rank order. Differentiable.

    Args:
        tensor: Tensor with at least one dimension. All dimensions but the first are equal on all ranks.
        splits: List or int32 tensor with one number for each rank. The sum may be less than the rows.
            Without it, all ranks get the same number of rows.
        name: Key that matches the ranks' calls.
        process_set: Ranks that make the call.

    Returns:
        The received rows. With ``splits``, also the number of rows from each rank (int32).
    """
    output, received = run(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits=splits)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``alltoall``. ``synchronize`` gives (output, received_splits), with and without splits."""
    return start(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits=splits)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce (Average or Sum), return this rank's rows: d // n of d, one more on the first d % n ranks."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,), compression)[0]


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``reducescatter``. Returns a handle."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return start(call, (tensor,))


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors. Works like ``reducescatter``."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors, compression)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``grouped_reducescatter``. ``synchronize`` gives a tuple."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors)


def join(device: int = -1) -> int:
    """Help the other ranks with zeros until all have joined.

    Returns:
        The global rank that joined last, equal on all ranks. ``device`` is accepted but has no effect.
    """
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    collectives.barrier(session.engine(), set_id(process_set))


# Wrap each public function so that torch.compile calls it without compiling it.
globals().update({name: compiler_disable(globals()[name]) for name in __all__})
