"""Contract, TensorFlow: alltoall."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_inputs import (
    DIMS,
    MOVED,
    ODD,
    RANK,
    SIZE,
    WITH_GRADIENT,
    check_gradients,
    dims_of,
    refused,
    several,
    value,
)

import horovod.tensorflow as hvd


def rows(numbers: list[int], dims: int, dtype: Any) -> Any:
    """Return rows filled with these numbers, with 17 elements in each further dimension."""
    column = np.array(numbers, np.int64).reshape(-1, *[1] * (dims - 1))
    return tf.cast(tf.constant(np.broadcast_to(column, (len(numbers), *[17] * (dims - 1)))), dtype)


def check(way: Any, splits: Any, dtypes: Any = MOVED) -> None:
    """Check ``splits(sender, receiver)``, the number of rows sent. Rows contain the sender's number mod 2."""
    mine = [splits(RANK, other) for other in range(SIZE)]
    inputs = [rows([RANK % 2] * sum(mine), dims, dtype) for dtype in dtypes for dims in dims_of(dtype)]
    got = way(lambda x: [hvd.alltoall(tensor, tf.constant(mine, tf.int32)) for tensor in x], inputs)
    arriving = [splits(other, RANK) for other in range(SIZE)]
    senders = [other % 2 for other in range(SIZE) for _ in range(arriving[other])]
    for (result, received), item in zip(got, inputs, strict=True):
        assert received.dtype == tf.int32
        assert value(received).tolist() == arriving
        assert result.dtype == item.dtype
        np.testing.assert_array_equal(value(result), value(rows(senders, len(item.shape), item.dtype)))


def test_splits(way: Any) -> None:
    check(way, lambda sender, receiver: sender + 1)


def test_splits_of_different_length(way: Any) -> None:
    check(way, lambda sender, receiver: receiver + 1, [tf.int32, tf.float32])


def test_equal_split(way: Any) -> None:
    inputs = [rows(list(range(SIZE)), dims, dtype) for dtype in MOVED for dims in dims_of(dtype)]
    got = way(lambda x: [hvd.alltoall(tensor) for tensor in x], inputs)
    for result, item in zip(got, inputs, strict=True):
        want = rows([RANK] * SIZE, len(item.shape), item.dtype)
        np.testing.assert_array_equal(value(result), value(want))


def test_empty_tensors(way: Any) -> None:
    for shape in ((0,), (0, 5)):
        result, received = way(lambda x: hvd.alltoall(x, tf.zeros(SIZE, tf.int32)), tf.zeros(shape))
        assert tuple(result.shape) == shape
        assert value(received).tolist() == [0] * SIZE
        assert tuple(way(hvd.alltoall, tf.zeros(shape)).shape) == shape


def test_one_rank_sends_nothing(way: Any) -> None:
    check(way, lambda sender, receiver: 0 if sender == 0 else 2, [tf.int32, tf.float64])


def test_one_rank_receives_nothing(way: Any) -> None:
    check(way, lambda sender, receiver: 0 if receiver == 0 else 2, [tf.int32, tf.float64])


def test_splits_of_nothing_but_zeros(way: Any) -> None:
    """All ranks have rows, but none sends any."""
    result, received = way(lambda x: hvd.alltoall(x, tf.zeros(SIZE, tf.int32)), tf.ones((3, 4)))
    assert tuple(result.shape) == (0, 4)
    assert value(received).tolist() == [0] * SIZE


@several
def test_type_mismatch(way: Any) -> None:
    dtype = tf.int32 if ODD else tf.float32
    refused(way, lambda: hvd.alltoall(tf.ones(SIZE, dtype), name="sent"), "type")


@several
def test_dims_mismatch(way: Any) -> None:
    refused(way, lambda: hvd.alltoall(tf.ones((SIZE, 17 + RANK)), name="sent"), "shape")
    shape = (SIZE, 17) if ODD else (SIZE, 17, 1)
    refused(way, lambda: hvd.alltoall(tf.ones(shape), name="sent"), "shape")


@several
def test_rows_that_do_not_divide(way: Any) -> None:
    refused(
        way, lambda: hvd.alltoall(tf.ones(SIZE + 1), name="sent"), "splits",
        kind=tf.errors.InvalidArgumentError,
    )


def test_splits_that_cannot_be(way: Any) -> None:
    """Splits are refused if they are for too many rows or too many ranks, or are not a flat list."""
    for splits in ([2] * SIZE, [1] * (SIZE + 1), [[1] * SIZE]):
        wrong = tf.constant(splits, tf.int32)
        refused(
            way, lambda wrong=wrong: hvd.alltoall(tf.ones(SIZE), wrong, name="sent"), "splits",
            kind=tf.errors.InvalidArgumentError,
        )


def test_gradient(way: Any) -> None:
    """Gradients go back the way the rows came. Rank r's gradient for the rows it received is r + 1."""
    for dtype in WITH_GRADIENT:
        inputs = [rows([1] * (SIZE * (RANK + 1)), dims, dtype) for dims in DIMS]
        want = [rows(np.repeat(np.arange(1, SIZE + 1), RANK + 1).tolist(), dims, dtype) for dims in DIMS]
        check_gradients(
            way, lambda x: [hvd.alltoall(item, tf.constant([RANK + 1] * SIZE))[0] for item in x], inputs, want
        )


def test_gradient_of_an_equal_split(way: Any) -> None:
    for dtype in WITH_GRADIENT:
        inputs = [rows([1] * (2 * SIZE), dims, dtype) for dims in DIMS]
        want = [rows(np.repeat(np.arange(1, SIZE + 1), 2).tolist(), dims, dtype) for dims in DIMS]
        check_gradients(way, lambda x: [hvd.alltoall(tensor) for tensor in x], inputs, want)
