"""All ranks' inputs to collectives, and the expected results, which NumPy computes from these inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import ringdance.numpy as hvd

Array = np.ndarray[Any, Any]

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
DTYPES = (*INTEGERS, *FLOATS, "complex64", "bool")
OPERATIONS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def allowed(dtype: str) -> list[str]:
    if dtype.startswith("complex"):
        return ["sum", "average"]
    return [name for name in OPERATIONS if dtype != "bool" or name != "average"]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def values(rank: int, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return the input of `rank`, the same on every rank. Integers are too small to overflow."""
    made = np.random.default_rng([rank, seed, 11])
    if dtype == "bool":
        drawn = made.integers(0, 2, shape)
    elif dtype in INTEGERS:
        drawn = made.integers(0 if dtype.startswith("u") else -3, 4, shape)
    else:
        drawn = made.normal(size=shape)
        if dtype.startswith("complex"):
            drawn = drawn + 1j * made.normal(size=shape)
    return np.asarray(drawn).astype(dtype_of(dtype))


def all_values(ranks: int | Sequence[int], dtype: str, shape: tuple[int, ...], seed: int = 0) -> list[Array]:
    return [values(rank, dtype, shape, seed) for rank in (range(ranks) if isinstance(ranks, int) else ranks)]


def reduced(parts: Sequence[Array], operation: str, pre: float = 1.0, post: float = 1.0) -> Array:
    """Reduce in rank order: 16-bit floats in float32, rounded once; integer averages truncated exactly."""
    dtype = parts[0].dtype
    if dtype.kind == "c":  # as pairs of floats
        flat = [part.reshape(-1).view(part.real.dtype) for part in parts]
        return reduced(flat, operation, pre, post).view(dtype).reshape(parts[0].shape)
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    scaled = [part if pre == 1.0 else scaled_by(part, pre, wide) for part in parts]
    total = scaled[0].astype(wide)
    for part in scaled[1:]:
        ufunc = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(operation, np.add)
        total = ufunc(total, part.astype(wide))
    if operation == "average":
        if dtype.kind in "iu" and post == 1.0:
            return integer_average(scaled)
        if post == 1.0:
            return (total / wide.type(len(parts))).astype(dtype)
        return scaled_by(total, post / len(parts), dtype)
    return total.astype(dtype) if post == 1.0 else scaled_by(total, post, dtype)


def integer_average(parts: Sequence[Array]) -> Array:
    """Average integers of any size with Python's integers. The result is truncated toward zero."""
    total = np.asarray(sum(part.astype(object) for part in parts), object)
    cut = [number // len(parts) if number >= 0 else -(-number // len(parts)) for number in total.ravel()]
    return np.array(cut, object).reshape(total.shape).astype(parts[0].dtype)


def any_integers(rank: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """Draw integers from the whole range of a type, including its limits."""
    limit = np.iinfo(dtype)
    made = np.random.default_rng([rank, 7]).integers(limit.min, limit.max, shape, dtype, endpoint=True)
    ends = [limit.max, limit.min, limit.max - 1, limit.min + 1, (limit.min, limit.max)[rank % 2]]
    made.reshape(-1)[: len(ends)] = ends[: made.size]
    return np.asarray(made)


def scaled_by(array: Array, factor: float, dtype: np.dtype[Any]) -> Array:
    """Return `array` times `factor` as `dtype`, computed in float64 for integers, float32 for halves."""
    if dtype.kind in "iu":
        return np.trunc(array.astype(np.float64) * factor).astype(dtype)
    wide = np.float32 if dtype.itemsize == 2 else dtype.type
    return np.asarray(array.astype(wide) * wide(factor)).astype(dtype)


def adasum(parts: Sequence[Array]) -> Array:
    """Combine neighbors, then pairs of neighbors: a(1 - ab/2aa) + b(1 - ab/2bb), in double precision."""
    level = [part.astype(np.float64) for part in parts]
    while len(level) > 1:
        level = [_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def _pair(a: Array, b: Array) -> Array:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b


def rows_of(place: int, rows: int, members: int) -> slice:
    """Return the rows that the member at `place` receives from a reducescatter."""
    share, rest = divmod(rows, members)
    start = place * share + min(place, rest)
    return slice(start, start + share + (place < rest))


def same(got: Any, want: Any) -> None:
    """Assert that both have the same type, shape and bits."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.tobytes() != want.tobytes():
        wrong = np.flatnonzero(got.reshape(-1) != want.reshape(-1))
        raise AssertionError(
            f"{wrong.size} of {got.size} differ, first at {wrong[:3]}: "
            f"{got.reshape(-1)[wrong[:3]]} instead of {want.reshape(-1)[wrong[:3]]}"
        )
