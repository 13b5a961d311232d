"""The collective functions on torch tensors, with Horovod's names, argument order and results.

Unlike in Horovod, all functions accept bfloat16, uint8, int8, int16, unsigned, complex and bool tensors.
Non-contiguous tensors are copied first, except by in-place operations, which raise an error for them.

The arguments documented for ``allreduce`` have the same meaning in all functions. ``name`` is the key by
which calls are matched across ranks (unnamed calls match by order), and ``process_set`` contains the
participating ranks. All functions raise the same types of errors.
Variants with ``_async`` immediately return a handle for ``poll`` and ``synchronize``. Variants that end in
``_`` work in place and are not differentiable. ``grouped_`` variants exchange several tensors together.
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
    """Return the reduction of ``tensor`` over all ranks, with the same shape and dtype. Differentiable.

    Args:
        tensor: Tensor with the same shape and dtype on all ranks.
        average: Deprecated: use ``op``. True means Average, False means Sum.
        name: Key by which calls are matched across ranks. Unnamed calls match by order.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``, or an object with the methods ``compress``
            and ``decompress``.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor applied to each rank's input.
        postscale_factor: Factor applied to the result.
        process_set: The participating ranks.

    Raises:
        ValueError: An argument is invalid. The error may be raised on this rank only.
        MismatchError: The ranks passed different shapes, dtypes or operations. Raised on all ranks.
    """
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,), compression)[0]


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce``. Pass the returned handle to ``synchronize`` to get the result."""
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
    """Start an ``allreduce_``. ``synchronize`` returns the tensor."""
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
    """Start a ``grouped_allreduce``. ``synchronize`` returns a tuple."""
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
    """Reduce all gradients of a step, and end the step. The results may reuse the inputs' memory.

    ``parameters`` contains the names of the parameters, for error messages.
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
    """Compare parameters across the ranks if a comparison is due. See ``training.gradients.weights``."""
    weights.compare_if_due(exchange, names, advice, set_id(process_set), lambda: sample_of(tensors))


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce_``. ``synchronize`` returns a tuple of the tensors."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors, in_place=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start gathering the entries of all ranks' sparse tensors. Return a function that waits for the result.

    The result is a sparse tensor. Entries with equal indices from different ranks stay separate
    (``coalesce()`` sums them). Average divides the values by the number of ranks. Any other ``op`` is treated
    as Sum.
    """
    if not tensor.is_sparse:
        raise ArgumentError(
            f"sparse_allreduce_async needs a sparse tensor, but got {tensor.type()}. Use allreduce_async for "
            "dense tensors."
        )
    divide = pick_operation(None, op) is ReduceOp.AVERAGE
    # torch stores one column of indices per entry, but the gather concatenates rows.
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
    """Concatenate the ranks' tensors along dimension 0, whose size may differ by rank. Differentiable."""
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
    """Start a ``grouped_allgather``. ``synchronize`` returns a tuple."""
    return start(movement(Collective.ALLGATHER, name, process_set, True), tensors)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of global rank ``root_rank``. Shapes and dtypes must match. Differentiable."""
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
    """Send ``splits[j]`` rows to rank j of the set. Returns received rows in rank order. Differentiable.

    Args:
        tensor: Tensor with at least one dimension. All dimensions except the first must match across ranks.
        splits: Number of rows to send to each rank, as a list or an int32 tensor. The sum may be less than
            the number of rows in ``tensor``. By default, the rows are split equally.
        name: Key by which calls are matched across ranks.
        process_set: The participating ranks.

    Returns:
        The received rows. If ``splits`` is given, also the number of rows received from each rank (int32).
    """
    output, received = run(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits=splits)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``alltoall``. ``synchronize`` returns (output, received_splits), even without splits."""
    return start(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits=splits)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce ``tensor`` over all ranks (Average or Sum), and return this rank's share of the rows.

    For d rows and n ranks, each rank gets d // n rows, and the first d % n ranks get one more row each.
    """
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
    """Start a ``grouped_reducescatter``. ``synchronize`` returns a tuple."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return start(call, tensors)


def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' calls until all ranks have joined.

    ``device`` is accepted but has no effect.

    Returns:
        The global rank that joined last. The result is the same on all ranks.
    """
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of the set have called this function."""
    collectives.barrier(session.engine(), set_id(process_set))


# Wrap each public function so that torch.compile calls it without tracing into it.
globals().update({name: compiler_disable(globals()[name]) for name in __all__})
