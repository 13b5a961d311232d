"""Execute a batch of requests that all members have agreed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ringdance.core.exchange import Exchange, Steps, aligned_empty
from ringdance.core.exchange.adasum import adasum
from ringdance.core.exchange.arithmetic import Reduction, dtype_named, neutral_element, reduction
from ringdance.core.exchange.base import as_bytes
from ringdance.core.exchange.chunks import even_rows
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.errors import ArgumentError, EngineError, MismatchError

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class AgreedRequest:
    """A request that all members have agreed on. ``work`` is None if this rank has joined."""

    name: str
    description: Description
    work: Work | None


def _request(item: AgreedRequest) -> Request:
    """Return the item's request or, if this rank has joined, a request filled with neutral elements."""
    if item.work is not None:
        return item.work.request
    d = item.description
    pairs = zip(d.shapes, d.dtypes, strict=True)
    views = tuple(
        np.full(shape, neutral_element(dtype, d.operation), dtype_named(dtype)) for shape, dtype in pairs
    )
    return Request(d, views, views)


def _outputs(request: Request) -> list[Array]:
    if request.outputs is not None:
        return list(request.outputs)
    return [aligned_empty(view.shape, view.dtype) for view in request.inputs]


def _output(request: Request, index: int, shape: tuple[int, ...]) -> Array:
    """Return the caller's output array if its shape and dtype fit the result, otherwise a new array."""
    provided = None if request.outputs is None else request.outputs[index]
    if provided is not None and provided.shape == shape and provided.dtype == request.inputs[index].dtype:
        return provided
    return aligned_empty(shape, request.inputs[index].dtype)


def execute(exchange: Exchange, members: Sequence[int], batch: Sequence[AgreedRequest]) -> Steps:
    """Execute a batch. Returns a list with one entry for each item: its results or an exception."""
    d = batch[0].description
    if d.detail and d.kind != Collective.BARRIER:
        return [_zero_dim_error(item.name, item.description) for item in batch]
    if d.device:
        if d.device not in exchange.devices:
            try:
                made = yield from exchange.context.make_device[d.device](exchange, d.device)
            except ArgumentError as error:  # on all members
                return [error] * len(batch)
            exchange.devices = {**exchange.devices, d.device: made}  # a copy: another thread may read it
        pairs = [(item.description, None if item.work is None else item.work.request) for item in batch]
        return (yield from exchange.devices[d.device].execute(pairs, members))
    requests = [_request(item) for item in batch]
    if d.kind == Collective.ALLREDUCE:
        return (yield from _allreduce(exchange, requests))
    if d.kind == Collective.BROADCAST:
        return (yield from _broadcast(exchange, requests, members.index(d.root)))
    results: list[list[Array]] = []
    for item, request in zip(batch, requests, strict=True):
        if d.kind == Collective.ALLGATHER:
            results.append((yield from _allgather(exchange, request)))
        elif d.kind == Collective.ALLTOALL:
            results.append((yield from _alltoall(exchange, request, item.work)))
        elif d.kind == Collective.REDUCESCATTER:
            results.append((yield from _reducescatter(exchange, request)))
        elif d.kind == Collective.BARRIER:  # nothing to do, as the round has synchronized the members
            results.append([])
        else:
            raise _not_executed(d.kind)
    return results


def _not_executed(kind: Collective) -> EngineError:
    return EngineError(f"Internal error: the engine cannot execute {kind.name}. Please report this error.")


def _zero_dim_error(name: str, description: Description) -> MismatchError:
    return MismatchError(
        f"'{name}': {description.kind.name.lower()} needs tensors with at least one dimension, but got a "
        "scalar on all ranks. Reshape the scalar to shape (1,) before the call."
    )


def _numbers(views: Sequence[Array], how: Reduction) -> Sequence[Array]:
    """View contiguous complex arrays as flat arrays of floats. Returns all other arrays unchanged."""
    return [view.reshape(-1).view(how.dtype) for view in views] if how.pairs else views


def allreduce_flat(exchange: Exchange, requests: Sequence[Request], how: Reduction) -> Steps:
    """Execute all-reduces that have the same dtype. Returns a list of outputs for each request."""
    if len(requests) == 1 and len(requests[0].inputs) == 1:
        source = requests[0].inputs[0]
        provided = requests[0].outputs
        target = aligned_empty(source.shape, source.dtype) if provided is None else provided[0]
        if source.ndim == 1 and not how.pairs:
            yield from exchange.allreduce((source,), (target,), how)
        else:
            flat = _numbers((source.reshape(-1),), how), _numbers((target.reshape(-1),), how)
            yield from exchange.allreduce(*flat, how)
        return [[target]]
    outputs, inputs, targets = _flatten(requests)
    yield from exchange.allreduce(_numbers(inputs, how), _numbers(targets, how), how)
    return outputs


def _flatten(requests: Sequence[Request]) -> tuple[list[list[Array]], list[Array], list[Array]]:
    """Return each request's outputs, and flat views of all inputs and of all outputs."""
    outputs = [_outputs(request) for request in requests]
    inputs = [view.reshape(-1) for request in requests for view in request.inputs]
    return outputs, inputs, [view.reshape(-1) for group in outputs for view in group]


def _allreduce(exchange: Exchange, requests: Sequence[Request]) -> Steps:
    d = requests[0].description
    dtypes = tuple(dict.fromkeys(d.dtypes))
    if len(dtypes) == 1 and d.operation != ReduceOp.ADASUM:
        how = reduction(dtypes[0], d.operation, d.prescale, d.postscale, exchange.size)
        return (yield from allreduce_flat(exchange, requests, how))
    outputs, inputs, targets = _flatten(requests)
    if d.operation == ReduceOp.ADASUM:
        for source, target in zip(inputs, targets, strict=True):
            yield from adasum(exchange, source, target, d.prescale, d.postscale)
        return outputs
    for dtype in dtypes:  # a group with several dtypes needs one exchange per dtype
        how = reduction(dtype, d.operation, d.prescale, d.postscale, exchange.size)
        chosen = [i for i, name in enumerate(d.dtypes) if name == dtype]
        parts = [[views[i] for i in chosen] for views in (inputs, targets)]
        yield from exchange.allreduce(_numbers(parts[0], how), _numbers(parts[1], how), how)
    return outputs


def _broadcast(exchange: Exchange, requests: Sequence[Request], root: int) -> Steps:
    outputs = [_outputs(request) for request in requests]
    inputs = [view for request in requests for view in request.inputs]
    targets = [view for group in outputs for view in group]
    is_root = exchange.rank == root
    yield from exchange.broadcast([as_bytes(view) for view in (inputs if is_root else targets)], root)
    if is_root:
        for source, target in zip(inputs, targets, strict=True):
            if target is not source:
                yield from exchange.copy(source, target)
    return outputs


def _allgather(exchange: Exchange, request: Request) -> Steps:
    inputs = request.inputs
    counts = yield from exchange.gather_words([view.shape[0] for view in inputs])
    outputs = []
    receives: list[list[Array]] = [[] for _ in range(exchange.size)]
    for index, (view, rows) in enumerate(zip(inputs, zip(*counts, strict=True), strict=True)):
        output = _output(request, index, (sum(rows), *view.shape[1:]))
        outputs.append(output)
        for rank, part in enumerate(_cut(output, rows)):
            if rank == exchange.rank:
                yield from exchange.copy(view, part)
            receives[rank].append(as_bytes(part))
    lengths = [sum(view.size for view in views) for views in receives]
    yield from exchange.stream([as_bytes(view) for view in inputs], lengths, receives)
    return outputs


def _alltoall(exchange: Exchange, request: Request, work: Work | None) -> Steps:
    size = exchange.size
    assert request.splits is not None
    table = yield from exchange.gather_words([int(n) for splits in request.splits for n in splits])
    outputs, received = [], []
    for i, view in enumerate(request.inputs):
        row_bytes = math.prod(view.shape[1:]) * view.dtype.itemsize
        matrix = [row[i * size : (i + 1) * size] for row in table]  # number of rows, by sender and receiver
        incoming = [row[exchange.rank] for row in matrix]
        output = _output(request, i, (sum(incoming), *view.shape[1:]))
        sends = _cut(as_bytes(view), [n * row_bytes for n in matrix[exchange.rank]])
        receives = _cut(as_bytes(output), [n * row_bytes for n in incoming])
        yield from exchange.alltoall(sends, receives, max(map(max, matrix)) * row_bytes)
        outputs.append(output)
        received.append(np.array(incoming, np.int64))
    if work is not None:
        work.received_splits = received
    return outputs


def _cut(rows: Array, counts: Iterable[int]) -> list[Array]:
    """Split an array along its first dimension. Part i has ``counts[i]`` rows."""
    ends = list(accumulate(counts, initial=0))
    return [rows[start:end] for start, end in pairwise(ends)]


def _reducescatter(exchange: Exchange, request: Request) -> Steps:
    d = request.description
    outputs = []
    for index, (view, dtype) in enumerate(zip(request.inputs, d.dtypes, strict=True)):
        rows = even_rows(view.shape[0], exchange.size)
        output = _output(request, index, (rows[exchange.rank], *view.shape[1:]))
        how = reduction(dtype, d.operation, d.prescale, d.postscale, exchange.size)
        width = math.prod(view.shape[1:]) * (1 + how.pairs)
        source, target = _numbers((view.reshape(-1), output.reshape(-1)), how)
        yield from exchange.reducescatter(source, [n * width for n in rows], target, how)
        outputs.append(output)
    return outputs


def complete_alone(work: Work, rank: int, change_set: Callable[[Description], int]) -> None:
    """Complete a request to a process set whose only member is this rank.

    Args:
        work: The request's Work.
        rank: This rank.
        change_set: Adds or removes a process set, and returns its id.
    """
    d = work.request.description
    if d.kind == Collective.JOIN:
        work.finish(rank)
    elif d.kind in (Collective.ADD_SET, Collective.REMOVE_SET):
        work.finish(change_set(d))
    elif d.detail and d.kind != Collective.BARRIER:
        work.finish(error=_zero_dim_error(work.name, d))
    else:
        work.finish(_execute_alone(work))


def _execute_alone(work: Work) -> list[Array]:
    """Return the results of a request without peers: the inputs, scaled if requested."""
    request, d = work.request, work.request.description
    if d.kind == Collective.ALLTOALL:
        assert request.splits is not None
        work.received_splits = [np.array(splits, np.int64) for splits in request.splits]
        rows = [int(splits[0]) for splits in request.splits]
        return [view[:count].copy() for view, count in zip(request.inputs, rows, strict=True)]
    scaled = d.kind in (Collective.ALLREDUCE, Collective.REDUCESCATTER)
    if not scaled and d.kind not in (Collective.ALLGATHER, Collective.BROADCAST, Collective.BARRIER):
        raise _not_executed(d.kind)
    outputs = _outputs(request)
    for view, output, dtype in zip(request.inputs, outputs, d.dtypes, strict=True):
        if scaled:
            how = reduction(dtype, d.operation, d.prescale, d.postscale, 1)
            how.alone(*_numbers((view, output), how))
        elif output is not view:
            output[...] = view
    return outputs
