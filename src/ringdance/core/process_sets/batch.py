"""Decide which agreed requests are executed together. Depends only on data that all members share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ringdance.core.exchange.arithmetic import dtype_named
from ringdance.core.request import Collective, Description, ReduceOp


def description_bytes(description: Description) -> int:
    """Return the size in bytes of a request's tensors. The description must have complete shapes."""
    pairs = zip(description.dtypes, description.shapes, strict=True)
    return sum([math.prod(shape) * dtype_named(dtype).itemsize for dtype, shape in pairs])


def _batch_key(description: Description) -> tuple[Any, ...] | None:
    """Return a key that requests in the same batch must share, or None if this request must run alone."""
    if len(set(description.dtypes)) != 1 or description.detail:
        return None
    if description.kind == Collective.ALLREDUCE and description.operation != ReduceOp.ADASUM:
        d = description
        return (d.kind, d.device, d.dtypes[0], d.operation, d.prescale, d.postscale)
    if description.kind == Collective.BROADCAST:
        return (description.kind, description.device, description.root)
    return None


def is_plain(description: Description) -> bool:
    """Return True for an all-reduce of one dtype in host memory, which may share a batch with others."""
    on_host = description.kind == Collective.ALLREDUCE and not description.device
    return on_host and _batch_key(description) is not None


def plan_batches(descriptions: Sequence[Description], threshold: int) -> list[list[int]]:
    """Group requests, given in agreed order, into batches of at most ``threshold`` bytes.

    A request that is larger than ``threshold`` forms its own batch. If the threshold is 0, all requests do.
    Returns lists of positions in ``descriptions``.
    """
    batches: list[list[int]] = []
    open_batches: dict[tuple[Any, ...], tuple[int, int]] = {}  # key -> (batch, bytes so far)
    for position, description in enumerate(descriptions):
        key = _batch_key(description)
        if key is None:
            batches.append([position])
            continue
        nbytes = description_bytes(description)
        batch, filled = open_batches.get(key, (-1, 0))
        if batch < 0 or filled + nbytes > threshold:
            batches.append([])
            batch, filled = len(batches) - 1, 0
        batches[batch].append(position)
        open_batches[key] = (batch, filled + nbytes)
    return batches
