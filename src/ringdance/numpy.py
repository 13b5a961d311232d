"""Collectives on NumPy arrays.

Import this module with ``import ringdance.numpy as hvd``. The dtype for bfloat16 is ``ml_dtypes.bfloat16``.
All collectives have these options:

- If the input is a list or tuple of arrays, the arrays are exchanged together, and the result is a list.
- ``out`` receives the results and must have the inputs' shapes and dtypes. To reduce or broadcast in place,
  without a copy, pass the inputs themselves as ``out``.
- With ``wait=False``, a call immediately returns a handle for ``poll`` and ``synchronize``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringdance.core.request import Collective, Work
from ringdance.errors import ArgumentError
from ringdance.training import collectives, handles, session
from ringdance.training.collectives import Array, Call, allreduce_call, movement, reducescatter_call
from ringdance.training.exports import *
from ringdance.training.exports import __all__ as __all__
from ringdance.training.handles import poll, synchronize
from ringdance.training.loaders.binding import arrays
from ringdance.training.process_sets import set_id

__all__ = [
    *__all__, "allgather", "allreduce", "alltoall", "barrier", "broadcast", "image_loader", "join",
    "poll", "reducescatter", "synchronize", "table_loader",
]

image_loader, table_loader = arrays.image_loader, arrays.table_loader

Arrays = npt.ArrayLike | list[Array] | tuple[Array, ...]


def _is_group(arrays: Any) -> bool:
    return isinstance(arrays, (list, tuple)) and (not arrays or isinstance(arrays[0], np.ndarray))


def _view(value: npt.ArrayLike) -> Array:
    array = np.asarray(value)
    return array if array.flags.c_contiguous else array.copy(order="C")


def _check_out(arrays: tuple[Array, ...], views: tuple[Array, ...]) -> None:
    for array, view in zip(arrays, views, strict=True):
        if not isinstance(array, np.ndarray) or not (array.flags.c_contiguous and array.flags.writeable):
            raise ArgumentError("out must be a contiguous, writable NumPy array, or a list of such arrays.")
        if (array.shape, array.dtype) != (view.shape, view.dtype):
            raise ArgumentError(
                f"out has dtype {array.dtype} and shape {array.shape}, but the result has dtype "
                f"{view.dtype} and shape {view.shape}."
            )


def _run(call: Call, arrays: Any, out: Any = None, wait: bool = True, splits: Any = None) -> Any:
    """Run a call and return its results. If ``wait`` is False, only start it, and return a handle."""
    engine, grouped = session.engine(), call.grouped
    try:
        views = tuple(map(_view, arrays)) if grouped else (_view(arrays),)
        outputs = None
        if out is not None:
            outputs = tuple(out) if grouped else (out,)
            if grouped or out is not views[0] or not out.flags.writeable:
                _check_out(outputs, views)
        elif call.keeps_shapes:  # the engine would align the memory for TensorFlow, which takes 1 µs
            outputs = tuple(map(np.empty_like, views)) if grouped else (np.empty_like(views[0]),)
        rows = None if splits is None else (np.asarray(splits),)
    except (ArgumentError, TypeError, ValueError) as error:
        call.refuse(engine, error)
        raise

    work = call.submit(engine, views, outputs, rows, not wait)
    if not wait:
        return handles.hold(work, lambda done: _result(done, grouped, out, splits))
    work.wait()
    return _result(work, grouped, out, splits)


def _result(work: Work, grouped: bool, out: Any, splits: Any) -> Any:
    if out is not None:
        return out
    if splits is not None and work.received_splits is not None:
        return work.result[0], work.received_splits[0]
    return list(work.result) if grouped else work.result[0]


def allreduce(
    array: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *, out: Any = None,
    wait: bool = True,
) -> Any:
    """Return the reduction of ``array`` over all ranks, with the same shape and dtype.

    Args:
        array: Array with the same shape and dtype on all ranks, or a list of such arrays.
        name: Key that matches this call with the other ranks' calls. Unnamed calls match by order.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor applied to each rank's input.
        postscale_factor: Factor applied to the result.
        process_set: The participating ranks.
        out: Array (or list) that receives the result and is returned. Pass ``array`` to reduce in place.
        wait: If False, return a handle.

    Raises:
        ArgumentError: An argument is invalid. May be raised on this rank only.
        MismatchError: Shapes, dtypes or operations differ between ranks. Raised on all ranks.
    """
    grouped = _is_group(array)
    call = allreduce_call(name, None, op, prescale_factor, postscale_factor, process_set, grouped)
    return _run(call, array, out, wait)


def allgather(
    array: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    wait: bool = True,
) -> Any:
    """Return the ranks' arrays concatenated along dimension 0, whose length may differ between ranks."""
    return _run(movement(Collective.ALLGATHER, name, process_set, _is_group(array)), array, None, wait)


def broadcast(
    array: Arrays, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    out: Any = None, wait: bool = True,
) -> Any:
    """Return the array from global rank ``root_rank``. All ranks must pass the same shape and dtype."""
    call = movement(Collective.BROADCAST, name, process_set, _is_group(array), root_rank)
    return _run(call, array, out, wait)


def alltoall(
    array: npt.ArrayLike, splits: npt.ArrayLike | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, wait: bool = True,
) -> Any:
    """Send ``splits[j]`` rows to rank j of the set, and receive rows from every rank, in rank order.

    Args:
        array: Array with at least one dimension. All dimensions except the first must match across ranks.
        splits: Number of rows to send to each rank. The sum may be less than the number of rows in the
            array. By default, the rows are split equally.
        name: Key that matches this call with the other ranks' calls.
        process_set: The participating ranks.
        wait: If False, return a handle.

    Returns:
        The received rows. If ``splits`` is given, also the number of rows received from each rank (int64).
    """
    return _run(movement(Collective.ALLTOALL, name, process_set), array, None, wait, splits)


def reducescatter(
    array: Arrays, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, *, wait: bool = True,
) -> Any:
    """Reduce (Average or Sum) over all ranks, and return this rank's share of the rows.

    For d rows and n ranks, each rank gets d // n rows, and the first d % n ranks get one more.
    """
    grouped = _is_group(array)
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, grouped)
    return _run(call, array, None, wait)


def join() -> int:
    """Contribute zeros to other ranks' calls until all ranks have joined. Return the last rank to join."""
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks in the set have called this function."""
    collectives.barrier(session.engine(), set_id(process_set))
