"""Run collective calls on MXNet arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ringdance.core.request import Work
from ringdance.errors import ArgumentError
from ringdance.mxnet.errors import as_mxnet
from ringdance.mxnet.memory import Array, NDArray, array_of, empty, from_array, on_host, write
from ringdance.training import session
from ringdance.training.collectives import Call

Tensors = Sequence[NDArray]


def run(call: Call, tensors: Tensors, splits: Any = None) -> list[NDArray]:
    """Run a call and return new arrays. For an alltoall, append the number of rows from each rank (int32).

    Args:
        call: The collective and its options.
        tensors: All arrays of a group, or a single array.
        splits: Number of rows to send to each rank, as a sequence or an array of integers. Only for an
            alltoall.
    """
    with as_mxnet():
        work, outputs = _submit(call, tensors, splits=splits)
        results = work.wait()
        if outputs is None:
            outputs = [from_array(result, like) for result, like in zip(results, tensors, strict=True)]
        else:
            _deliver(results, outputs)
        if work.received_splits is not None:
            outputs.append(from_array(work.received_splits[0].astype(np.int32), tensors[0]))
        call.completed()
        return outputs


def run_in_place(calls: Sequence[tuple[Call, Tensors]]) -> None:
    """Run calls concurrently. Each call writes its results to its own arrays.

    If a call fails, the error is raised after all calls have finished, because the other ranks also make all
    calls, and no call may write to its arrays after this function has returned.
    """
    works: list[tuple[Work, Call, Tensors]] = []
    errors: list[Exception] = []
    with as_mxnet():
        for call, tensors in calls:
            try:
                works.append((_submit(call, tensors, in_place=True)[0], call, tensors))
            except Exception as error:
                errors.append(error)
        for work, call, tensors in works:
            try:
                _deliver(work.wait(), tensors)
                call.completed()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _submit(
    call: Call, tensors: Tensors, in_place: bool = False, splits: Any = None
) -> tuple[Work, list[NDArray] | None]:
    """Submit a call. Return its work, and the result arrays or ``None`` if their shapes are not known yet."""
    engine = session.engine()
    outputs: list[NDArray] | None = None
    try:
        views = tuple([array_of(tensor, in_place) for tensor in tensors])
        if not call.keeps_shapes and not all(view.ndim for view in views):
            what = call.kind.name.lower()
            raise ArgumentError(f"{what} needs at least one dimension. Pass x.reshape(1) for a scalar x.")
        splits = array_of(splits) if isinstance(splits, mx.nd.NDArray) else splits
        rows = None if splits is None else (np.asarray(splits),)
        if in_place:
            outputs = list(tensors)
        elif call.keeps_shapes:
            outputs = [empty(tensor.shape, tensor.dtype, tensor) for tensor in tensors]
        targets = None if outputs is None else views if in_place else _memory_of(outputs)
    except Exception as error:
        call.refuse(engine, error)
        raise
    return call.submit(engine, views, targets, rows), outputs


def _memory_of(outputs: Tensors) -> tuple[Array, ...]:
    return tuple([
        array_of(out, written=True) if on_host(out) else np.empty(out.shape, out.dtype) for out in outputs
    ])


def _deliver(results: Sequence[Array], outputs: Tensors) -> None:
    """Copy results to those outputs that are not in host memory."""
    for result, output in zip(results, outputs, strict=True):
        if not on_host(output):
            write(result, output)
