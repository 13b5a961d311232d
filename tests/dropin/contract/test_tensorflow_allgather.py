"""Contract, TensorFlow: allgather and grouped_allgather."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_inputs import (
    DIMS,
    MOVED,
    ODD,
    RANK,
    ROWS,
    SIZE,
    WITH_GRADIENT,
    check_gradients,
    dims_of,
    draw,
    refused,
    same,
    several,
    value,
)

import horovod.tensorflow as hvd

NUMBERS = {"equal": [17] * SIZE, "uneven": ROWS[:SIZE]}
numbers = pytest.mark.parametrize("rows", NUMBERS)


def parts(dtype: Any, dims: int, rows: list[int]) -> list[Any]:
    """Return each rank's tensor."""
    return [draw(dtype, dims, seed=10 * dims + rank, rows=rows[rank]) for rank in range(SIZE)]


def joined(each: list[Any]) -> Any:
    return np.concatenate([value(tensor) for tensor in each])


@numbers
def test_rows_of_all_ranks_in_order(way: Any, rows: str) -> None:
    each = [parts(dtype, dims, NUMBERS[rows]) for dtype in MOVED for dims in dims_of(dtype)]
    got = way(lambda x: [hvd.allgather(tensor) for tensor in x], [tensor[RANK] for tensor in each])
    for result, item in zip(got, each, strict=True):
        same(result, joined(item))


def test_many_in_one_graph(way: Any) -> None:
    each = [parts(tf.float32, 2, [(rank + i) % 4 for rank in range(SIZE)]) for i in range(40)]
    got = way(
        lambda x: [hvd.allgather(entry, name=f"gather.{i}") for i, entry in enumerate(x)],
        [tensor[RANK] for tensor in each],
    )
    for result, tensor in zip(got, each, strict=True):
        same(result, joined(tensor))


@several
def test_shape_mismatch(way: Any) -> None:
    refused(way, lambda: hvd.allgather(tf.ones((17, 17 + RANK)), name="gathered"), "shape")


@several
def test_type_mismatch(way: Any) -> None:
    dtype = tf.int32 if ODD else tf.float32
    refused(way, lambda: hvd.allgather(tf.ones(17, dtype), name="gathered"), "type")


def test_no_dimension(way: Any) -> None:
    refused(way, lambda: hvd.allgather(tf.constant(1.0), name="scalar"), "at least one dimension")


@numbers
def test_gradient(way: Any, rows: str) -> None:
    """The result is this rank's rows of the averaged gradient. Here all rows equal the mean of rank + 1."""
    for dtype in WITH_GRADIENT:
        inputs = [parts(dtype, dims, NUMBERS[rows])[RANK] for dims in DIMS]
        check_gradients(way, lambda x: [hvd.allgather(tensor) for tensor in x], inputs, [(SIZE + 1) / 2] * 3)


def test_gradient_takes_this_ranks_rows(way: Any) -> None:
    """Rows have different gradients, equal on all ranks. Each rank gets the gradients of its own rows."""
    starts = np.cumsum([0, *ROWS[:SIZE]])
    weights = tf.range(int(starts[-1]), dtype=tf.float64)

    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            weighted = tf.reduce_sum(hvd.allgather(x) * weights)
        return tape.gradient(weighted, x)

    got = way(compute, tf.zeros(ROWS[RANK], tf.float64))
    same(got, np.arange(starts[RANK], starts[RANK + 1], dtype=np.float64))


@numbers
def test_grouped(way: Any, rows: str) -> None:
    each = [parts(dtype, 2, NUMBERS[rows]) for dtype in MOVED]
    got = way(hvd.grouped_allgather, [tensor[RANK] for tensor in each])
    for result, tensor in zip(got, each, strict=True):
        same(result, joined(tensor))


def test_grouped_gradient(way: Any) -> None:
    inputs = [parts(tf.float64, dims, ROWS)[RANK] for dims in DIMS]
    check_gradients(way, hvd.grouped_allgather, inputs, [(SIZE + 1) / 2] * 3)
