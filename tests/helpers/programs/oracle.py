"""The correct results of a planned operation, computed by NumPy without any communication."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from programs.plan import Planned
from ringdance.core.request import Collective, ReduceOp

__all__ = ["brought", "check", "dtype_of", "expected"]

Array = np.ndarray[Any, Any]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _shape(planned: Planned, tensor: int, place: int) -> tuple[int, ...]:
    rest = planned.shapes[tensor]
    if planned.kind == Collective.ALLGATHER:
        return (planned.rows[tensor][place], *rest)
    if planned.kind == Collective.ALLTOALL:
        return (sum(planned.rows[tensor][place]) + planned.spare, *rest)
    return rest


@lru_cache(maxsize=4096)  # in one process, all ranks request the same values
def _values(planned: Planned, tensor: int, place: int) -> Array:
    """Return integers that differ between places, as a read-only array.

    Unscaled integer types use their whole range. Other values are small: sums of eight fit any dtype.
    """
    shape = _shape(planned, tensor, place)
    dtype = dtype_of(planned.dtypes[tensor])
    numbers = (
        np.arange(math.prod(shape), dtype=np.int64) * 7 + planned.number * 13 + place * 5 + tensor * 3
    )
    if dtype.kind in "iu" and planned.prescale == planned.postscale == 1.0:
        numbers *= 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and its multiples spread over all bits
        numbers >>= 64 - 8 * dtype.itemsize
    elif planned.operation == ReduceOp.PRODUCT:
        numbers = numbers % 3 + 1
    elif planned.operation == ReduceOp.ADASUM:
        numbers = numbers % 11 + 1  # all positive: near a sum of 0, Adasum amplifies rounding
    elif dtype == np.bool_:
        numbers = (numbers // 3) % 2
    elif dtype.kind == "u":
        numbers = numbers % 19
    else:
        numbers = numbers % 23 - 11
    made = numbers.astype(dtype).reshape(shape)
    made.flags.writeable = False
    return made


def brought(planned: Planned, place: int) -> list[Array]:
    """Return the inputs of the member at `place`."""
    return [_values(planned, i, place).copy() for i in range(len(planned.dtypes))]


def _parts(planned: Planned, tensor: int, members: int) -> list[Array]:
    """Return the members' inputs. Joined members contribute zeros, or nothing if zeros would matter."""
    who = planned.contributors or tuple(range(members))
    if planned.operation in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        return [_values(planned, tensor, place) for place in who]
    zeros = np.zeros(_shape(planned, tensor, 0), dtype_of(planned.dtypes[tensor]))
    return [_values(planned, tensor, place) if place in who else zeros for place in range(members)]


def _adasum(parts: list[Array]) -> Array:
    level = [part.astype(np.float64) for part in parts]
    while len(level) > 1:
        level = [_adasum_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def _adasum_pair(a: Array, b: Array) -> Array:
    dot, first, second = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    left = 1 - dot / (2 * first) if first else 1.0
    right = 1 - dot / (2 * second) if second else 1.0
    return np.asarray(a * left + b * right)


@lru_cache(maxsize=4096)
def _reduced(planned: Planned, tensor: int, members: int) -> Array:
    """Reduce in double precision or with Python's integers, then round or truncate once."""
    parts = _parts(planned, tensor, members)
    dtype = parts[0].dtype
    operation = planned.operation
    if operation == ReduceOp.ADASUM:
        return _adasum(parts).astype(dtype)
    if dtype == np.bool_:
        together = np.stack(parts)
        return together.any(0) if operation in (ReduceOp.SUM, ReduceOp.MAX) else together.all(0)
    integer = dtype.kind in "iu"
    if planned.prescale != 1.0:
        parts = [part.astype(np.float64) * planned.prescale for part in parts]
        parts = [part.astype(dtype) for part in parts] if integer else parts  # truncated here
    stacked = np.stack([part.astype(object if integer else np.float64) for part in parts])
    by = {ReduceOp.MIN: np.min, ReduceOp.MAX: np.max, ReduceOp.PRODUCT: np.prod}.get(operation, np.sum)
    total = np.asarray(by(stacked, axis=0))
    divisor = members if operation == ReduceOp.AVERAGE else 1
    if not integer:
        return (total * planned.postscale / divisor).astype(dtype)
    if planned.postscale != 1.0:
        return np.trunc(total.astype(np.float64) * (planned.postscale / divisor)).astype(dtype)
    exact = [n // divisor if n >= 0 else -(-n // divisor) for n in total.reshape(-1).tolist()]
    wrapped = [n % (1 << 8 * dtype.itemsize) for n in exact]  # sums and products may not fit
    return np.array(wrapped, f"u{dtype.itemsize}").view(dtype).reshape(total.shape)


def expected(planned: Planned, place: int, members: int, root: int) -> tuple[list[Array], list[list[int]]]:
    """Return the outputs and received splits of the member at `place`. `root` is a place too."""
    outputs: list[Array] = []
    received: list[list[int]] = []
    for tensor in range(len(planned.dtypes)):
        parts = _parts(planned, tensor, members)
        if planned.kind == Collective.ALLREDUCE:
            outputs.append(_reduced(planned, tensor, members))
        elif planned.kind == Collective.BROADCAST:
            outputs.append(parts[root])
        elif planned.kind == Collective.ALLGATHER:
            outputs.append(np.concatenate(parts))
        elif planned.kind == Collective.REDUCESCATTER:
            outputs.append(np.array_split(_reduced(planned, tensor, members), members)[place])
        else:
            table = planned.rows[tensor]
            starts = [sum(row[:place]) for row in table]  # type: ignore[arg-type]
            cut = [part[s : s + row[place]] for part, s, row in zip(parts, starts, table, strict=True)]  # type: ignore[index]
            outputs.append(np.concatenate(cut))
            received.append([row[place] for row in table])  # type: ignore[index]
    return outputs, received


_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 3e-6, "float64": 1e-12}


def check(found: list[Array], right: list[Array]) -> str:
    """Return how `found` differs from `right`, or ""."""
    if len(found) != len(right):
        return f"{len(found)} results instead of {len(right)}"
    for i, (actual, other) in enumerate(zip(found, right, strict=True)):
        if actual.dtype != other.dtype or actual.shape != other.shape:
            return f"tensor {i}: {actual.dtype} {actual.shape} instead of {other.dtype} {other.shape}"
        if actual.tobytes() == other.tobytes():
            continue
        tolerance = _TOLERANCE.get(str(actual.dtype), 0.0)
        a, b = actual.astype(np.float64), other.astype(np.float64)
        # Averages of 16-bit floats are rounded on each host before they cancel.
        if not np.allclose(a, b, rtol=tolerance, atol=20 * tolerance if tolerance < 1e-4 else 10 * tolerance):
            where = np.argwhere(~np.isclose(a, b, rtol=tolerance))[:3].tolist()
            values = f"{actual.ravel()[:8]} is not {other.ravel()[:8]}"
            return f"tensor {i} ({actual.dtype} {actual.shape}) differs at {where}: {values}"
    return ""
