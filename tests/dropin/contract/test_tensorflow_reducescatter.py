"""Contract, TensorFlow: reducescatter and grouped_reducescatter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_inputs import (
    DIMS,
    ODD,
    RANK,
    SCATTERED,
    SIZE,
    WITH_GRADIENT,
    check_gradients,
    draw,
    every,
    near,
    refused,
    same,
    scaled,
    several,
    total,
    value,
)

import horovod.tensorflow as hvd


def own(array: Any, rank: int = RANK) -> Any:
    """Return a rank's rows. If they do not divide evenly, the first ranks get one more."""
    return np.array_split(np.asarray(array), SIZE)[rank]


def check(way: Any, given: list[Any], want: Any, compare: Any = same, **options: Any) -> None:
    got = way(lambda x: [hvd.reducescatter(tensor, **options) for tensor in x], given)
    for result, tensor in zip(got, given, strict=True):
        compare(result, own(want(tensor)))


def test_sum(way: Any) -> None:
    check(way, every(SCATTERED, rows=4 * SIZE), total, op=hvd.Sum)


def test_average(way: Any) -> None:
    """Average is the default."""
    check(way, every(SCATTERED, rows=4 * SIZE), value)
    check(way, every(SCATTERED, rows=4 * SIZE), value, op=hvd.Average)


def test_prescale(way: Any) -> None:
    inputs = every(SCATTERED, rows=4 * SIZE)
    check(way, inputs, lambda one: total(scaled(one, 0.3141)), near, op=hvd.Sum, prescale_factor=0.3141)


def test_postscale(way: Any) -> None:
    inputs = every(SCATTERED, rows=4 * SIZE)
    check(way, inputs, lambda one: scaled(total(one), 0.3141), near, op=hvd.Sum, postscale_factor=0.3141)


def test_many_in_one_graph(way: Any) -> None:
    inputs = [tensor for seed in range(3) for tensor in every(SCATTERED, seed=seed, rows=2 * SIZE)]
    got = way(
        lambda x: [hvd.reducescatter(entry, op=hvd.Sum, name=f"cut.{i}") for i, entry in enumerate(x)], inputs
    )
    for result, tensor in zip(got, inputs, strict=True):
        same(result, own(total(tensor)))


@pytest.mark.parametrize("rows", [1, SIZE + 1, 4 * SIZE - 1])
def test_rows_that_do_not_divide(way: Any, rows: int) -> None:
    """The first ranks get one row more, and the last ones may get none."""
    check(way, every(SCATTERED, rows=rows), total, op=hvd.Sum)


def test_no_dimension(way: Any) -> None:
    refused(way, lambda: hvd.reducescatter(tf.constant(1.0), name="scalar"), "at least one dimension")


@several
def test_shape_mismatch(way: Any) -> None:
    refused(way, lambda: hvd.reducescatter(tf.ones((17 + RANK, 17)), name="cut"), "shape")
    refused(way, lambda: hvd.reducescatter(tf.ones(306 if ODD else (18, 17)), name="cut"), "shape")


@several
def test_type_mismatch(way: Any) -> None:
    dtype = tf.int32 if ODD else tf.float32
    refused(way, lambda: hvd.reducescatter(tf.ones(17, dtype), name="cut"), "type")


def test_other_operations(way: Any) -> None:
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(tf.errors.AbortedError, match="Sum and Average"):
            way(lambda op=op: hvd.reducescatter(tf.ones(SIZE), op=op))


# Gradients: the ranks' incoming rows (rank + 1) together. For Sum, times the number of ranks.

FACTORS = {"sum": (hvd.Sum, SIZE), "average": (hvd.Average, 1)}
operations = pytest.mark.parametrize("op", FACTORS)


def gathered(rows: int, dims: int, factor: float) -> Any:
    parts = [np.full((len(own(range(rows), rank)), *[17] * (dims - 1)), rank + 1.0) for rank in range(SIZE)]
    return factor * np.concatenate(parts)


@operations
def test_gradient(way: Any, op: str) -> None:
    chosen, factor = FACTORS[op]
    for dtype in WITH_GRADIENT:
        inputs = [draw(dtype, dims, rows=2 * SIZE + 1) for dims in DIMS]
        want = [gathered(2 * SIZE + 1, dims, factor) for dims in DIMS]
        check_gradients(way, lambda x: [hvd.reducescatter(tensor, op=chosen) for tensor in x], inputs, want)


def test_gradient_with_factors(way: Any) -> None:
    inputs = [draw(tf.float64, 2, rows=2 * SIZE)]
    for options, factor in (({"prescale_factor": 0.5}, 0.5), ({"postscale_factor": 3.0}, 3.0)):
        check_gradients(
            way, lambda x, options=options: [hvd.reducescatter(x[0], op=hvd.Sum, **options)], inputs,
            [gathered(2 * SIZE, 2, factor * SIZE)],
        )


# Groups.


def check_group(way: Any, want: Any, compare: Any = same, **options: Any) -> None:
    for dims in DIMS:
        inputs = [draw(dtype, dims, rows=4 * SIZE + 1, seed=seed) for seed, dtype in enumerate(SCATTERED)]
        got = way(lambda x: hvd.grouped_reducescatter(x, **options), inputs)
        for result, tensor in zip(got, inputs, strict=True):
            compare(result, own(want(tensor)))


def test_grouped_sum(way: Any) -> None:
    check_group(way, total, op=hvd.Sum)


def test_grouped_average(way: Any) -> None:
    check_group(way, value)


def test_grouped_prescale(way: Any) -> None:
    check_group(way, lambda one: total(scaled(one, 0.3141)), near, op=hvd.Sum, prescale_factor=0.3141)


def test_grouped_postscale(way: Any) -> None:
    check_group(way, lambda one: scaled(total(one), 0.3141), near, op=hvd.Sum, postscale_factor=0.3141)


def test_grouped_no_dimension(way: Any) -> None:
    refused(
        way, lambda: hvd.grouped_reducescatter([tf.ones(SIZE), tf.constant(1.0)]), "at least one dimension"
    )


@operations
def test_grouped_gradient(way: Any, op: str) -> None:
    chosen, factor = FACTORS[op]
    inputs = [draw(tf.float64, dims, rows=2 * SIZE + 1) for dims in DIMS]
    want = [gathered(2 * SIZE + 1, dims, factor) for dims in DIMS]
    check_gradients(way, lambda x: hvd.grouped_reducescatter(x, op=chosen), inputs, want)
