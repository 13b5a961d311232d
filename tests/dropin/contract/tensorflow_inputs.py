"""Inputs, ways to run, tolerances and repeated checks for the contract's TensorFlow tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampled import part

import horovod.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
ODD = RANK % 2 == 1

Array = np.ndarray[Any, Any]
REDUCED = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64]
MOVED = [*REDUCED, tf.uint16, tf.int16, tf.bool]
SCATTERED = [tf.int32, tf.int64, tf.float16, tf.float32, tf.float64]
WITH_GRADIENT = [tf.float32, tf.float64]
DIMS = (1, 2, 3)
ROWS = [17, 32, 81, 12, 15, 23, 22] * 5


def dims_of(dtype: Any) -> list[int]:
    """Return the numbers of dimensions to test with a type: one of them each day."""
    return part(f"dimensions of {dtype}", DIMS, 1)


class Way:
    """How a function of tensors runs: eagerly or as a tf.function, on the CPU or on this rank's GPU."""

    def __init__(self, place: str) -> None:
        self.place = place
        device, _, kind = place.partition("-")
        self.graph = kind == "graph"
        self.device = "/cpu:0" if device == "cpu" else f"/gpu:{gpu()}"

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return the function's result for these tensors, which are moved to the device."""
        with tf.device(self.device):
            there = tf.nest.map_structure(tf.identity, given)
            made = tf.function(function) if self.graph else function
            return made(*there)


def gpu() -> int:
    """Return the number of this rank's GPU, or skip the test if there is none."""
    cards = tf.config.list_physical_devices("GPU")
    if not cards:
        (pytest.fail if os.environ.get("RINGDANCE_TEST_GPU") == "1" else pytest.skip)("needs a GPU")
    return hvd.local_rank() % len(cards)


def draw(dtype: Any, dims: int = 1, *, seed: int = 1234, most: int = 100, rows: int = 17) -> Any:
    """Draw integers from -most to most - 1, 17 per dimension. Equal seeds give equal tensors.

    8-bit types get values up to 20, not below 0 if they are unsigned, so that sums fit.
    """
    most = min(most, 20) if dtype in (tf.uint8, tf.int8) else most
    low = 0 if dtype in (tf.uint8, tf.uint16, tf.bool) else -most
    numbers = np.random.default_rng(seed).integers(low, most, [rows, *[17] * (dims - 1)])
    return tf.constant((numbers % 2 if dtype is tf.bool else numbers).astype(dtype.as_numpy_dtype))


def every(dtypes: Sequence[Any], **others: Any) -> list[Any]:
    """Return a tensor of each type with one to three dimensions."""
    return [draw(dtype, dims, **others) for dtype in dtypes for dims in dims_of(dtype)]


def ranks_of(process_set: Any = None) -> list[int]:
    return list(range(SIZE)) if process_set is None else process_set.ranks


def value(tensor: Any) -> Array:
    return np.asarray(tensor.numpy())


def same(got: Any, want: Any) -> None:
    """Assert equal type, shape and values. Values are exact for integers, and on up to 3 ranks."""
    wanted = np.asarray(want)
    assert got.dtype.as_numpy_dtype == wanted.dtype
    assert tuple(got.shape) == wanted.shape
    if SIZE <= 3 or wanted.dtype.kind != "f":
        np.testing.assert_array_equal(value(got), wanted)
    elif SIZE < 15:
        np.testing.assert_allclose(value(got), wanted, rtol=0, atol=1e-4 if SIZE < 10 else 5e-4)


def all_same(got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for actual, other in zip(got, want, strict=True):
        same(actual, other)


def near(got: Any, want: Array) -> None:
    """Like ``same`` for results of rounded factors: integers exact, floats within a few last-place units."""
    assert got.dtype.as_numpy_dtype == want.dtype
    if want.dtype.kind == "f":
        np.testing.assert_allclose(value(got), want, rtol=8 * np.finfo(want.dtype).eps, atol=1e-6)
    else:
        np.testing.assert_array_equal(value(got), want)


def scaled(tensor: Any, factor: float) -> Array:
    """Scale a tensor in float64 (half precision in float32). Integers are truncated."""
    array = np.asarray(tensor)
    result = array.astype(np.float32 if array.dtype == np.float16 else np.float64) * factor
    return (result if array.dtype.kind == "f" else np.trunc(result)).astype(array.dtype)


def total(like: Any, process_set: Any = None) -> Array:
    """Return the sum over the ranks if all have this tensor, in its type."""
    array = np.asarray(like)
    return (array * array.dtype.type(len(ranks_of(process_set)))).astype(array.dtype)


def gradients(way: Way, kind: Callable[[Any], Any], given: Any) -> list[Array]:
    """Return the inputs' gradients if the gradient of each result is ``rank + 1`` everywhere.

    Args:
        way: How to run the function.
        kind: Function from the list of inputs to the list of results.
        given: Inputs.
    """

    def compute(tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            results = kind(tensors)
        incoming = [tf.ones_like(result) * tf.cast(RANK + 1, result.dtype) for result in results]
        return tape.gradient(results, tensors, output_gradients=incoming)

    return [value(tensor) for tensor in way(compute, given)]


def check_gradients(way: Way, kind: Callable[[Any], Any], given: Any, want: Sequence[Any]) -> None:
    """Assert that ``gradients`` returns these values in the inputs' shapes. Numbers are broadcast."""
    result = gradients(way, kind, given)
    assert len(result) == len(want)
    for actual, tensor, wanted in zip(result, given, want, strict=True):
        assert actual.shape == tuple(tensor.shape)
        assert np.linalg.norm(actual - np.asarray(wanted)) < 1e-6


def refused(
    way: Way, call: Callable[[], Any], *words: str, kind: Any = tf.errors.FailedPreconditionError
) -> None:
    """Assert that the call raises this TensorFlow error on all ranks each time, and the job continues."""
    for _ in range(2):
        with pytest.raises(kind) as caught:
            way(call)
        for word in ("rank", *words):
            assert word in str(caught.value)
    goes_on = way(lambda: hvd.allreduce(tf.ones(2), op=hvd.Sum, name="goes.on"))
    assert value(goes_on).tolist() == [SIZE] * 2
