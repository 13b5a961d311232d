"""Ringdance on NumPy arrays: ``import ringdance.numpy as hvd``.

The collectives of the torch module, for arrays. bfloat16 is ``ml_dtypes.bfloat16``. Arrays that are not
contiguous are copied first, except in place, where they raise. Functions with ``_async`` return
handles for ``poll`` and ``synchronize``; those that end in ``_`` write into their argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringdance import session
from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.errors import ArgumentError
from ringdance.training import collectives, handles
from ringdance.training.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringdance.training.collectives import movement, reduction
from ringdance.training.objects import allgather_object, broadcast_object
from ringdance.training.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    set_id,
)
from ringdance.training.sharding import Shard, shard

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Shard", "Sum", "add_process_set",
    "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "cross_rank", "cross_size",
    "global_process_set", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_size", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set",
    "shard", "shutdown", "size", "synchronize",
]

Array = np.ndarray[Any, Any]
Arrays = Sequence[npt.ArrayLike]

Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)

poll = handles.poll
synchronize = handles.synchronize


def _view(value: npt.ArrayLike) -> Array:
    array = np.asarray(value)
    return array if array.flags.c_contiguous else array.copy(order="C")


def _views(values: Arrays, in_place: bool = False) -> tuple[Array, ...]:
    """Return contiguous arrays; for operations in place the arrays themselves."""
    if not in_place:
        return tuple([_view(value) for value in values])
    for array in values:
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
            raise ArgumentError("An operation in place needs a contiguous, writable NumPy array.")
    return tuple(values)  # type: ignore[arg-type]


def _first(work: Work) -> Any:
    return work.result[0]


def _all(work: Work) -> Any:
    return tuple(work.result)


def _submit(call: collectives.Call, arrays: Arrays, in_place: bool, wake: bool, splits: Any = None) -> Work:
    engine = session.engine()
    try:
        views = _views(arrays, in_place)
        rows = None if splits is None else (np.asarray(splits),)
    except (ArgumentError, TypeError, ValueError) as error:
        call.refuse(engine, error)
        raise
    return call.submit(engine, views, views if in_place else None, rows, wake)


def _allreduce(
    arrays: Arrays, in_place: bool, name: str | None, op: int | None, prescale: float, postscale: float,
    process_set: ProcessSet, grouped: bool, wake: bool,
) -> Work:
    call = reduction(Collective.ALLREDUCE, name, None, op, prescale, postscale, process_set, grouped)
    return _submit(call, arrays, in_place, wake)


def allreduce(
    array: npt.ArrayLike, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the reduction of ``array`` over all ranks: same shape and type.

    Args:
        array: equal shape and type on all ranks.
        name: key that matches the ranks' calls; without one they match by order.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the input of each rank.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: an argument is wrong; only this rank may see it.
        MismatchError: ranks called it with different shapes, types or operations; raised on all.
    """
    scales = prescale_factor, postscale_factor
    work = _allreduce((array,), False, name, op, *scales, process_set, False, False)
    result: Array = work.wait()[0]
    return result


def allreduce_(
    array: Array, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce ``array`` over all ranks in place and return it."""
    _allreduce((array,), True, name, op, prescale_factor, postscale_factor, process_set, False, False).wait()
    return array


def allreduce_async(
    array: npt.ArrayLike, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce``; returns a handle."""
    scales = prescale_factor, postscale_factor
    work = _allreduce((array,), False, name, op, *scales, process_set, False, True)
    return handles.hold(work, _first)


def allreduce_async_(
    array: Array, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``allreduce_``; returns a handle."""
    work = _allreduce((array,), True, name, op, prescale_factor, postscale_factor, process_set, False, True)
    return handles.hold(work, lambda _: array)


def grouped_allreduce(
    arrays: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return the reductions of several arrays that are exchanged together; as ``allreduce``."""
    work = _allreduce(arrays, False, name, op, prescale_factor, postscale_factor, process_set, True, False)
    return list(work.wait())


def grouped_allreduce_(
    arrays: Sequence[Array], name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduce several arrays in place, exchanged together, and return them."""
    _allreduce(arrays, True, name, op, prescale_factor, postscale_factor, process_set, True, False).wait()
    return list(arrays)


def grouped_allreduce_async(
    arrays: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce``; ``synchronize`` gives a tuple."""
    work = _allreduce(arrays, False, name, op, prescale_factor, postscale_factor, process_set, True, True)
    return handles.hold(work, _all)


def grouped_allreduce_async_(
    arrays: Sequence[Array], name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``grouped_allreduce_``; ``synchronize`` gives a tuple of the arrays."""
    work = _allreduce(arrays, True, name, op, prescale_factor, postscale_factor, process_set, True, True)
    return handles.hold(work, lambda _: tuple(arrays))


def _allgather(
    arrays: Arrays, name: str | None, process_set: ProcessSet, grouped: bool, wake: bool
) -> Work:
    return _submit(movement(Collective.ALLGATHER, name, process_set, grouped), arrays, False, wake)


def allgather(
    array: npt.ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Return the ranks' arrays joined along dimension 0, which may differ between ranks."""
    result: Array = _allgather((array,), name, process_set, False, False).wait()[0]
    return result


def allgather_async(
    array: npt.ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an ``allgather``; returns a handle."""
    return handles.hold(_allgather((array,), name, process_set, False, True), _first)


def grouped_allgather(
    arrays: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather several arrays together; as ``allgather``."""
    return list(_allgather(arrays, name, process_set, True, False).wait())


def grouped_allgather_async(
    arrays: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``grouped_allgather``; ``synchronize`` gives a tuple."""
    return handles.hold(_allgather(arrays, name, process_set, True, True), _all)


def _broadcast(
    array: npt.ArrayLike, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet,
    wake: bool,
) -> Work:
    call = movement(Collective.BROADCAST, name, process_set, root=root_rank)
    return _submit(call, (array,), in_place, wake)


def broadcast(
    array: npt.ArrayLike, root_rank: int, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the array of global rank ``root_rank``; shape and type equal on all ranks."""
    result: Array = _broadcast(array, False, root_rank, name, process_set, False).wait()[0]
    return result


def broadcast_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Overwrite ``array`` with that of global rank ``root_rank`` and return it."""
    _broadcast(array, True, root_rank, name, process_set, False).wait()
    return array


def broadcast_async(
    array: npt.ArrayLike, root_rank: int, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a ``broadcast``; returns a handle."""
    return handles.hold(_broadcast(array, False, root_rank, name, process_set, True), _first)


def broadcast_async_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a ``broadcast_``; returns a handle."""
    return handles.hold(_broadcast(array, True, root_rank, name, process_set, True), lambda _: array)


def _alltoall(
    array: npt.ArrayLike, splits: npt.ArrayLike | None, name: str | None, process_set: ProcessSet, wake: bool
) -> Work:
    return _submit(movement(Collective.ALLTOALL, name, process_set), (array,), False, wake, splits)


def _exchanged(work: Work) -> tuple[Array, Array]:
    assert work.received_splits is not None
    return work.result[0], work.received_splits[0]


def alltoall(
    array: npt.ArrayLike, splits: npt.ArrayLike | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send ``splits[j]`` rows to rank j of the set and receive theirs, in rank order.

    Args:
        array: at least one dimension; all but the first equal on all ranks.
        splits: integers, one for each rank; their sum may be less than the rows. Without: equal shares.
        name: key that matches the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        The received rows; with ``splits`` also how many came from each rank (int64).
    """
    work = _alltoall(array, splits, name, process_set, False)
    work.wait()
    return _first(work) if splits is None else _exchanged(work)


def alltoall_async(
    array: npt.ArrayLike, splits: npt.ArrayLike | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an ``alltoall``; ``synchronize`` gives (rows, received splits)."""
    return handles.hold(_alltoall(array, splits, name, process_set, True), _exchanged)


def _reducescatter(
    arrays: Arrays, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet,
    grouped: bool, wake: bool,
) -> Work:
    call = reduction(Collective.REDUCESCATTER, name, None, op, prescale, postscale, process_set, grouped)
    return _submit(call, arrays, False, wake)


def reducescatter(
    array: npt.ArrayLike, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Array:
    """Reduce (Average or Sum) and return this rank's rows: d // n, one more on the first d % n ranks."""
    work = _reducescatter(
        (array,), name, op, prescale_factor, postscale_factor, process_set, False, False
    )
    result: Array = work.wait()[0]
    return result


def reducescatter_async(
    array: npt.ArrayLike, name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``reducescatter``; returns a handle."""
    work = _reducescatter((array,), name, op, prescale_factor, postscale_factor, process_set, False, True)
    return handles.hold(work, _first)


def grouped_reducescatter(
    arrays: Arrays, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce and scatter several arrays together; as ``reducescatter``."""
    work = _reducescatter(arrays, name, op, prescale_factor, postscale_factor, process_set, True, False)
    return list(work.wait())


def grouped_reducescatter_async(
    arrays: Arrays, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """Start a ``grouped_reducescatter``; ``synchronize`` gives a tuple."""
    work = _reducescatter(arrays, name, op, prescale_factor, postscale_factor, process_set, True, True)
    return handles.hold(work, _all)


def join() -> int:
    """Help the others with zeros until all ranks have joined; return the rank that joined last."""
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    collectives.barrier(session.engine(), set_id(process_set))
