"""Inputs, tolerances and repeated checks for the contract's MXNet tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
ODD = RANK % 2 == 1
OWN_TYPE = "int32" if ODD else "float32"

Array = np.ndarray[Any, Any]
REDUCED = ["int32", "int64", "float16", "float32", "float64"]
MOVED = [*REDUCED, "uint8", "int8"]
DIMS = (1, 2, 3)
FLAVORS = {"nd": mx.nd, "np": mx.np}


def draw(dtype: str, dims: int = 1, *, seed: int = 1234, rows: int = 17, flavor: Any = mx.nd) -> Any:
    """Draw integers from -100 to 99, 17 per dimension. Equal seeds give equal arrays.

    8-bit types get values from 0 to 19, so that sums fit.
    """
    low, high = (0, 20) if dtype.endswith("int8") else (-100, 100)
    numbers = np.random.default_rng(seed).integers(low, high, [rows, *[17] * (dims - 1)])
    return flavor.array(numbers.astype(dtype), dtype=dtype)


def every(dtypes: Sequence[str] = REDUCED, **others: Any) -> list[Any]:
    """Return an array of each type with one to three dimensions, alternating between the kinds of arrays."""
    kinds = list(FLAVORS.values())
    return [
        draw(dtype, dims, flavor=kinds[number % 2], **others)
        for number, dtype in enumerate(dtypes) for dims in DIMS
    ]  # fmt: skip


def members(process_set: Any = None) -> list[int]:
    return list(range(SIZE)) if process_set is None else process_set.ranks


def value(tensor: Any) -> Array:
    return np.asarray(tensor.asnumpy())


def total(tensor: Any, count: int = SIZE) -> Array:
    """Return the sum of `count` equal arrays, in their type."""
    array = value(tensor)
    return (array * array.dtype.type(count)).astype(array.dtype)


def scaled(tensor: Any, factor: float) -> Array:
    """Scale values in float64 (half precision in float32). Integers are truncated."""
    array = np.asarray(tensor)
    result = array.astype(np.float32 if array.dtype == np.float16 else np.float64) * factor
    return (result if array.dtype.kind == "f" else np.trunc(result)).astype(array.dtype)


def same(got: Any, want: Any) -> None:
    """Assert equal type, shape and values. Values are exact for integers, and on up to 3 ranks."""
    wanted = np.asarray(want)
    assert np.dtype(got.dtype) == wanted.dtype
    assert tuple(got.shape) == wanted.shape
    if SIZE <= 3 or wanted.dtype.kind != "f":
        np.testing.assert_array_equal(value(got), wanted)
    else:
        np.testing.assert_allclose(value(got), wanted, rtol=0, atol=1e-4 if SIZE < 10 else 5e-4)


def near(got: Any, want: Any) -> None:
    """Like ``same`` for results of rounded factors: integers exact, floats within a few last-place units."""
    wanted = np.asarray(want)
    if wanted.dtype.kind != "f":
        same(got, wanted)
        return
    assert np.dtype(got.dtype) == wanted.dtype
    np.testing.assert_allclose(value(got), wanted, rtol=8 * np.finfo(wanted.dtype).eps, atol=1e-6)


def refused(call: Callable[[], Any], *words: str, kind: Any = mx.MXNetError) -> None:
    """Assert that the call, or reading its result, raises this error on all ranks, and the job continues."""
    for _ in range(2):
        with pytest.raises(kind) as caught:
            read(call())
        for word in words:
            assert word in str(caught.value)
        mx.nd.waitall()
    assert value(hvd.allreduce(mx.nd.ones(2), op=hvd.Sum, name="goes.on")).tolist() == [SIZE] * 2


def read(result: Any) -> None:
    for item in result if isinstance(result, (list, tuple)) else [result]:
        item.wait_to_read()
