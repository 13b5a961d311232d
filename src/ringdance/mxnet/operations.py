"""The collective functions on MXNet's arrays, with Horovod's names, order of arguments and results.

``allreduce`` describes the arguments of all: ``name`` is the key that matches the ranks' calls (without one
they match by order), ``process_set`` the ranks that take part, and errors are of the same kinds. Forms that
end in ``_`` write into their argument; ``grouped_`` forms exchange several arrays together. None is
differentiable. A call returns when its results are there; ``priority`` has no effect.
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
    """Return the reduction of ``tensor`` over all ranks: same shape and type.

    Args:
        tensor: equal shape and type on all ranks.
        average: old form of ``op``: True is Average, False is Sum.
        name: key that matches the ranks' calls; without one they match by order.
        priority: without effect.
        prescale_factor: multiplies the input of each rank.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        op: Average (default), Sum, Adasum, Min, Max or Product.

    Raises:
        ValueError: an argument is wrong; only this rank may see it. As all of Ringdance's errors here
            it is an MXNetError too.
        MismatchError: ranks called it with different shapes, types or operations; raised on all.
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
    """Return the reductions of several arrays; as ``allreduce``."""
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
    """Return the ranks' arrays joined along dimension 0, which may differ between ranks."""
    return run(movement(Collective.ALLGATHER, name, process_set), (tensor,))[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[NDArray]:
    """Gather several arrays; as ``allgather``."""
    return run(movement(Collective.ALLGATHER, name, process_set, True), tensors) if tensors else []


def broadcast(
    tensor: NDArray, root_rank: int, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the array of global rank ``root_rank``; shape and type equal on all ranks."""
    return run(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))[0]


def broadcast_(
    tensor: NDArray, root_rank: int, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Overwrite ``tensor`` with that of global rank ``root_rank`` and return it."""
    run_in_place([(movement(Collective.BROADCAST, name, process_set, root=root_rank), (tensor,))])
    return tensor


def alltoall(
    tensor: NDArray, splits: Any = None, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Send ``splits[j]`` rows to rank j of the set, receive theirs in rank order.

    Args:
        tensor: at least one dimension; all but the first equal on all ranks.
        splits: a list or an int32 array, one number for each rank; their sum may be less than the rows.
            Without it all ranks get equally many.
        name: key that matches the ranks' calls.
        priority: without effect.
        process_set: the ranks that take part.

    Returns:
        The received rows; with ``splits`` also how many came from each rank (int32).
    """
    output, received = run(movement(Collective.ALLTOALL, name, process_set), (tensor,), splits)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: NDArray, op: int = Average, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> NDArray:
    """Reduce (Average or Sum) and return this rank's rows: d // n of d, the first d % n ranks one more."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return run(call, (tensor,))[0]


def grouped_reducescatter(
    tensors: Tensors, op: int = Average, name: str | None = None, priority: int = 0,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[NDArray]:
    """Reduce and scatter several arrays; as ``reducescatter``."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return run(call, tensors) if tensors else []


@as_mxnet()
def join() -> int:
    """Help the other ranks with zeros until all have joined; return the global rank that joined last."""
    return collectives.join(session.engine())


@as_mxnet()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    collectives.barrier(session.engine(), set_id(process_set))
