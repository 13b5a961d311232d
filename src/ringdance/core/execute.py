"""One agreed batch, carried out: from requests to results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdance.core.exchange import Exchange, Steps, aligned_empty
from ringdance.core.exchange.adasum import adasum
from ringdance.core.exchange.arithmetic import Reduction, dtype_named, reduction
from ringdance.core.exchange.base import as_bytes
from ringdance.core.exchange.chunks import even_rows
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.errors import MismatchError

__all__ = ["AgreedRequest", "allreduce_flat", "execute", "execute_alone"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class AgreedRequest:
    """A request that all members have agreed to execute; ``work`` is None where this rank has joined."""

    name: str
    description: Description
    work: Work | None


def _request(item: AgreedRequest) -> Request:
    """Return the item's request; a joined rank takes part with zeros (contract 3.8)."""
    if item.work is not None:
        return item.work.request
    d = item.description
    zeros = tuple(
        np.zeros(shape, dtype_named(dtype)) for dtype, shape in zip(d.dtypes, d.shapes, strict=True)
    )
    return Request(d, zeros, zeros)


def _outputs(request: Request) -> list[Array]:
    if request.outputs is not None:
        return list(request.outputs)
    return [aligned_empty(view.shape, view.dtype) for view in request.inputs]


def execute(exchange: Exchange, members: Sequence[int], batch: Sequence[AgreedRequest]) -> Steps:
    """Run a batch; return a list of results, one for each item, or of exceptions."""
    kind = batch[0].description.kind
    if batch[0].description.detail and kind != Collective.BARRIER:
        return [_zero_dim_error(item) for item in batch]
    requests = [_request(item) for item in batch]
    if kind == Collective.ALLREDUCE:
        return (yield from _allreduce(exchange, requests))
    if kind == Collective.BROADCAST:
        return (yield from _broadcast(exchange, requests, list(members).index(batch[0].description.root)))
    results = []
    for item, request in zip(batch, requests, strict=True):
        if kind == Collective.ALLGATHER:
            results.append((yield from _allgather(exchange, request)))
        elif kind == Collective.ALLTOALL:
            results.append((yield from _alltoall(exchange, request, item.work)))
        elif kind == Collective.REDUCESCATTER:
            results.append((yield from _reducescatter(exchange, request)))
        else:
            results.append([])  # a barrier: the agreement was the meeting
    return results


def _zero_dim_error(item: AgreedRequest) -> MismatchError:
    kind = item.description.kind.name.lower()
    return MismatchError(
        f"'{item.name}': {kind} needs tensors with at least one dimension, and got a scalar on all ranks. "
        "Reshape it to one element first."
    )


def allreduce_flat(exchange: Exchange, requests: Sequence[Request], how: Reduction) -> Steps:
    """Reduce requests of one dtype; return the outputs of each."""
    if len(requests) == 1 and len(requests[0].inputs) == 1:
        source = requests[0].inputs[0]
        given = requests[0].outputs
        target = aligned_empty(source.shape, source.dtype) if given is None else given[0]
        if source.ndim == 1:
            yield from exchange.allreduce((source,), (target,), how)
        else:
            yield from exchange.allreduce((source.reshape(-1),), (target.reshape(-1),), how)
        return [[target]]
    outputs = [_outputs(request) for request in requests]
    inputs = [view.reshape(-1) for request in requests for view in request.inputs]
    targets = [view.reshape(-1) for group in outputs for view in group]
    yield from exchange.allreduce(inputs, targets, how)
    return outputs


def _allreduce(exchange: Exchange, requests: Sequence[Request]) -> Steps:
    d = requests[0].description
    kinds = tuple(dict.fromkeys(d.dtypes))
    if len(kinds) == 1 and d.operation != ReduceOp.ADASUM:
        how = reduction(kinds[0], d.operation, d.prescale, d.postscale, exchange.size)
        return (yield from allreduce_flat(exchange, requests, how))
    outputs = [_outputs(request) for request in requests]
    inputs = [view.reshape(-1) for request in requests for view in request.inputs]
    targets = [view.reshape(-1) for group in outputs for view in group]
    if d.operation == ReduceOp.ADASUM:
        for source, target in zip(inputs, targets, strict=True):
            yield from adasum(exchange, source, target, d.prescale, d.postscale)
        return outputs
    for dtype in kinds:  # a group of several dtypes: one exchange for each
        how = reduction(dtype, d.operation, d.prescale, d.postscale, exchange.size)
        chosen = [i for i, name in enumerate(d.dtypes) if name == dtype]
        yield from exchange.allreduce([inputs[i] for i in chosen], [targets[i] for i in chosen], how)
    return outputs


def _broadcast(exchange: Exchange, requests: Sequence[Request], root: int) -> Steps:
    outputs = [_outputs(request) for request in requests]
    if exchange.rank == root:
        views = [as_bytes(view) for request in requests for view in request.inputs]
    else:
        views = [as_bytes(view) for group in outputs for view in group]
    yield from exchange.broadcast(views, root)
    if exchange.rank == root:
        for request, group in zip(requests, outputs, strict=True):
            for source, target in zip(request.inputs, group, strict=True):
                if target is not source:
                    yield from exchange.copy(source, target)
    return outputs


def _allgather(exchange: Exchange, request: Request) -> Steps:
    inputs = request.inputs
    counts = yield from exchange.gather_words([view.shape[0] for view in inputs])
    outputs = [
        aligned_empty((sum(row[i] for row in counts), *view.shape[1:]), view.dtype)
        for i, view in enumerate(inputs)
    ]
    receives: list[list[Array]] = [[] for _ in range(exchange.size)]
    for i, (view, output) in enumerate(zip(inputs, outputs, strict=True)):
        at = 0
        for place in range(exchange.size):
            part = output[at : at + counts[place][i]]
            at += counts[place][i]
            if place == exchange.rank:
                yield from exchange.copy(view, part)
            receives[place].append(as_bytes(part))
    lengths = [sum(view.size for view in views) for views in receives]
    yield from exchange.stream([as_bytes(view) for view in inputs], lengths, receives)
    return outputs


def _alltoall(exchange: Exchange, request: Request, work: Work | None) -> Steps:
    size = exchange.size
    assert request.splits is not None
    table = yield from exchange.gather_words([int(n) for splits in request.splits for n in splits])
    outputs, received = [], []
    for i, view in enumerate(request.inputs):
        row_bytes = int(np.prod(view.shape[1:], dtype=np.int64)) * view.dtype.itemsize
        matrix = [row[i * size : (i + 1) * size] for row in table]  # [from][to], in rows
        incoming = [matrix[place][exchange.rank] for place in range(size)]
        output = aligned_empty((sum(incoming), *view.shape[1:]), view.dtype)
        sends = _cut(as_bytes(view), [n * row_bytes for n in matrix[exchange.rank]])
        receives = _cut(as_bytes(output), [n * row_bytes for n in incoming])
        longest = max(max(row) for row in matrix) * row_bytes
        yield from exchange.alltoall(sends, receives, longest)
        outputs.append(output)
        received.append(np.array(incoming, np.int64))
    if work is not None:
        work.received_splits = received
    return outputs


def _cut(row: Array, counts: Sequence[int]) -> list[Array]:
    parts, at = [], 0
    for count in counts:
        parts.append(row[at : at + count])
        at += count
    return parts


def _reducescatter(exchange: Exchange, request: Request) -> Steps:
    d = request.description
    outputs = []
    for view, dtype in zip(request.inputs, d.dtypes, strict=True):
        rows = even_rows(view.shape[0], exchange.size)
        width = int(np.prod(view.shape[1:], dtype=np.int64))
        output = aligned_empty((rows[exchange.rank], *view.shape[1:]), view.dtype)
        how = reduction(dtype, d.operation, d.prescale, d.postscale, exchange.size)
        yield from exchange.reducescatter(
            view.reshape(-1), [n * width for n in rows], output.reshape(-1), how
        )
        outputs.append(output)
    return outputs


def execute_alone(request: Request, work: Work) -> list[Array]:
    """Return the result of a request when this rank is the only member: the identity, but for scales."""
    d = request.description
    if d.detail and d.kind != Collective.BARRIER:
        raise _zero_dim_error(AgreedRequest(work.name, d, work))
    if d.kind in (Collective.ALLREDUCE, Collective.REDUCESCATTER):
        outputs = _outputs(request)
        for view, output, dtype in zip(request.inputs, outputs, d.dtypes, strict=True):
            how = reduction(dtype, d.operation, d.prescale, d.postscale, 1)
            how.alone(view, output)
        return outputs
    if d.kind == Collective.ALLTOALL:
        assert request.splits is not None
        work.received_splits = [np.array(splits, np.int64) for splits in request.splits]
        return [
            view[: int(splits[0])].copy() for view, splits in zip(request.inputs, request.splits, strict=True)
        ]
    outputs = _outputs(request)
    for view, output in zip(request.inputs, outputs, strict=True):
        if output is not view:
            output[...] = view
    return outputs
