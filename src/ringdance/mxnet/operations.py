"""Collectives on MXNet arrays. Names, argument order and results are the same as in Horovod.

The arguments documented for ``allreduce`` have the same meaning in all functions. ``name`` is the key by
which calls are matched across ranks. Unnamed calls match by order. ``process_set`` contains the participating
ranks.
All functions raise the same types of errors. Functions whose names end with ``_`` work in place. ``grouped_``
functions exchange several arrays together. The functions are not differentiable. A call returns when its
results are complete. ``priority`` has no effect.
"""

from __future__ import annotations

from typing import Any

from ringdance.core.request import Collective
from ringdance.mxnet.errors import as_mxnet
from ringdance.mxnet.exchange import Tensors, run, run_in_place
from ringdance.mxnet.memory import NDArray
from ringdance.training import collectives, session
from ringdance.training.exports import Average
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "allgather", "allreduce", "allreduce_", "alltoall", "barrier", "broadcast", "broadcast_",
    "grouped_allgather", "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter", "join",
    "reducescatter",
]

allreduce_call = as_mxnet()(collectives.allreduce_call)
movement = as_mxnet()(collectives.movement)
reducescatter_call = as_mxnet()(collectives.reducescatter_call)


def allreduce(
    tensor: NDArray, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Return the reduction of ``tensor`` over all ranks, with the same shape and type.

    Args:
        tensor: Array with the same shape and type on all ranks.
        average: Deprecated form of ``op``: True means Average, False means Sum.
        name: Key by which calls are matched across ranks. Unnamed calls match by order.
        priority: Accepted and ignored.
        prescale_factor: Factor applied to each rank's input.
        postscale_factor: Factor applied to the result.
        process_set: The participating ranks.
        op: Average (default), Sum, Adasum, Min, Max or Product.

    Raises:
        ValueError: An argument is invalid. The error may be raised on this rank only. Like all Ringdance
            errors in this module, it is also an MXNetError.
        MismatchError: Shapes, types or operations differ between ranks. Raised on all ranks.
    """
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,))[0]


def allreduce_(
    tensor: NDArray, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce ``tensor`` over all ranks in place and return it."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set)
    run_in_place([(call, (tensor,))])
    return tensor


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """Return the reductions of several arrays. See ``allreduce``."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors) if tensors else []


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Tensors:
    """Reduce several arrays in place and return them."""
    call = allreduce_call(name, average, op, prescale_factor, postscale_factor, process_set, True)
    if tensors:
        run_in_place([(call, tensors)])
    return tensors


def allgather(
    tensor: NDArray, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> NDArray:
    """Return the ranks' arrays concatenated along dimension 0, whose length may differ between ranks."""
    return run(movement(Collective.ALLGATHER, name, process_set), (tensor,))[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[NDArray]:
    """Gather several arrays. See ``allgather``."""
    return run(movement(Collective.ALLGATHER, name, process_set, True), tensors) if tensors else []


def broadcast(
    tensor: NDArray, root_rank: int, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the array from global rank ``root_rank``. Its shape and type must be the same on all ranks."""
    return run(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))[0]


def broadcast_(
    tensor: NDArray, root_rank: int, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Overwrite ``tensor`` with the array from global rank ``root_rank`` and return it."""
    run_in_place([(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))])
    return tensor


def alltoall(
    tensor: NDArray, splits: Any = None, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Send ``splits[j]`` rows to rank j of the set. Returns received rows in rank order.

    Args:
        tensor: Array with at least one dimension. All dimensions except the first must match across ranks.
        splits: Number of rows to send to each rank, as a list or an int32 array. The sum may be less than the
            number of rows. By default, all ranks receive equal shares.
        name: Key by which calls are matched across ranks.
        priority: Accepted and ignored.
        process_set: The participating ranks.

    Returns:
        The received rows. If ``splits`` is given, also the number of rows from each rank (int32).
    """
    output, received = run(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: NDArray, op: int = Average, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> NDArray:
    """Reduce ``tensor`` over all ranks (Average or Sum), and return this rank's share of the rows.

    With d rows and n ranks, each rank gets d // n rows, and the first d % n ranks get one more.
    """
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,))[0]


def grouped_reducescatter(
    tensors: Tensors, op: int = Average, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[NDArray]:
    """Reduce and scatter several arrays. See ``reducescatter``."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors) if tensors else []


@as_mxnet()
def join() -> int:
    """Contribute zeros to other ranks' calls until all ranks have joined. Returns the last rank to join."""
    return collectives.join(session.engine())


@as_mxnet()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of the set have called this function."""
    collectives.barrier(session.engine(), set_id(process_set))
