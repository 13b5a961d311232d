"""Contract, TensorFlow: allreduce and grouped_allreduce."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_inputs import (
    ODD,
    RANK,
    REDUCED,
    SIZE,
    WITH_GRADIENT,
    all_same,
    check_gradients,
    draw,
    every,
    gpu,
    near,
    refused,
    same,
    scaled,
    several,
    total,
    value,
)

import horovod.tensorflow as hvd

MEAN = (SIZE + 1) / 2
TOTAL = SIZE * (SIZE + 1) / 2


def test_sum(way: Any) -> None:
    data = every(REDUCED)
    all_same(way(lambda x: [hvd.allreduce(item, average=False) for item in x], data), list(map(total, data)))
    all_same(way(lambda x: [hvd.allreduce(tensor, op=hvd.Sum) for tensor in x], data), list(map(total, data)))
    all_same(data, every(REDUCED))


def test_average(way: Any) -> None:
    inputs = every(REDUCED)
    all_same(way(lambda x: [hvd.allreduce(tensor, average=True) for tensor in x], inputs), inputs)
    all_same(way(lambda x: [hvd.allreduce(tensor, op=hvd.Average) for tensor in x], inputs), inputs)
    all_same(way(lambda x: [hvd.allreduce(tensor) for tensor in x], inputs), inputs)


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_min_max_product(way: Any, op: str) -> None:
    join = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}[op]
    each = [every(REDUCED, seed=1234 + rank, most=5) for rank in range(SIZE)]
    got = way(lambda x: [hvd.allreduce(tensor, op=getattr(hvd, op)) for tensor in x], each[RANK])
    all_same(got, [functools.reduce(join, map(value, ones)) for ones in zip(*each, strict=True)])


def test_many_in_one_graph(way: Any) -> None:
    """Three calls for each type and shape are started without waiting between them."""
    inputs = [tensor for seed in range(3) for tensor in every(REDUCED, seed=seed)]
    got = way(
        lambda x: [hvd.allreduce(entry, op=hvd.Sum, name=f"many.{i}") for i, entry in enumerate(x)], inputs
    )
    all_same(got, list(map(total, inputs)))


def test_each_call_on_another_gpu() -> None:
    cards = len(tf.config.list_physical_devices("GPU")) or gpu()
    for step, dtype in enumerate(REDUCED):
        with tf.device(f"/gpu:{(2 * hvd.local_rank() + (step + RANK) % 2) % cards}"):
            tensor = tf.identity(draw(dtype, 2))
            same(hvd.allreduce(tensor, op=hvd.Sum), total(tensor))


def test_prescale(way: Any) -> None:
    inputs = every(REDUCED)
    got = way(lambda x: [hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3141) for tensor in x], inputs)
    for item, tensor in zip(got, inputs, strict=True):
        near(item, total(scaled(tensor, 0.3141)))


def test_postscale(way: Any) -> None:
    inputs = every(REDUCED)
    got = way(lambda x: [hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.3141) for tensor in x], inputs)
    for item, tensor in zip(got, inputs, strict=True):
        near(item, scaled(total(tensor), 0.3141))


# Errors.


@several
def test_shape_mismatch(way: Any) -> None:
    refused(way, lambda: hvd.allreduce(tf.ones((17 + RANK, 17)), name="shapes"), "shape")


@several
def test_dims_mismatch(way: Any) -> None:
    shape = (17, 18) if ODD else (18, 17)
    refused(way, lambda: hvd.allreduce(tf.ones(shape), name="dims"), "shape")
    refused(way, lambda: hvd.allreduce(tf.ones(306 if ODD else shape), name="dims"), "shape")


@several
def test_type_mismatch(way: Any) -> None:
    dtype = tf.int32 if ODD else tf.float32
    refused(way, lambda: hvd.allreduce(tf.ones(17, dtype), name="types"), "type")


@several
def test_cpu_and_gpu_mismatch() -> None:
    """This is not an error here: GPU tensors pass through host memory, so ranks need not agree."""
    card = f"/gpu:{gpu()}"
    with tf.device(card if ODD else "/cpu:0"):
        assert value(hvd.allreduce(tf.ones(17), op=hvd.Sum, name="devices")).tolist() == [SIZE] * 17


# Gradients: for Sum the sum of all ranks' incoming gradients (rank + 1), for Average their mean.

GRADIENTS = {
    "sum": ({"op": hvd.Sum}, TOTAL), "average": ({"op": hvd.Average}, MEAN), "default": ({}, MEAN),
    "scaled": ({"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 0.5}, TOTAL),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", GRADIENTS)


@kinds
def test_gradient(way: Any, kind: str) -> None:
    options, want = GRADIENTS[kind]
    inputs = every(WITH_GRADIENT)
    check_gradients(
        way, lambda x: [hvd.allreduce(tensor, **options) for tensor in x], inputs, [want] * len(inputs)
    )


# Groups of five tensors of each type and number of dimensions.


def groups() -> list[list[Any]]:
    return [
        [draw(dtype, dims, seed=1234 + number) for number in range(5)]
        for dtype in REDUCED for dims in (1, 3)
    ]


def check_groups(way: Any, want: Any, compare: Any = same, **options: Any) -> None:
    """Check groups of tensors against ``want``, which maps a tensor to the expected array."""
    inputs = groups()
    got = way(lambda x: [hvd.grouped_allreduce(group, **options) for group in x], inputs)
    for results, group in zip(got, inputs, strict=True):
        assert len(results) == len(group)
        for result, tensor in zip(results, group, strict=True):
            compare(result, want(tensor))


def test_grouped_sum(way: Any) -> None:
    check_groups(way, total, op=hvd.Sum)
    check_groups(way, total, average=False)


def test_grouped_average(way: Any) -> None:
    check_groups(way, value, op=hvd.Average)
    check_groups(way, value, average=True)


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_grouped_min_max_product(way: Any, op: str) -> None:
    join = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}[op]
    each = [[draw(dtype, seed=70 + rank, most=5) for dtype in REDUCED] for rank in range(SIZE)]
    got = way(lambda x: hvd.grouped_allreduce(x, op=getattr(hvd, op)), each[RANK])
    all_same(got, [functools.reduce(join, map(value, ones)) for ones in zip(*each, strict=True)])


def test_grouped_prescale(way: Any) -> None:
    check_groups(way, lambda one: total(scaled(one, 0.3141)), near, op=hvd.Sum, prescale_factor=0.3141)


def test_grouped_postscale(way: Any) -> None:
    check_groups(way, lambda one: scaled(total(one), 0.3141), near, op=hvd.Sum, postscale_factor=0.3141)


def test_several_groups_in_one_graph(way: Any) -> None:
    inputs = [[draw(dtype, seed=number) for dtype in REDUCED] for number in range(6)]
    got = way(
        lambda x: [
            hvd.grouped_allreduce(group, op=hvd.Sum, name=f"group.{i}") for i, group in enumerate(x)
        ],
        inputs,
    )
    for results, group in zip(got, inputs, strict=True):
        all_same(results, list(map(total, group)))


@several
def test_grouped_mismatches(way: Any) -> None:
    def group(*shape: int, dtype: Any = tf.float32) -> Any:
        return lambda: hvd.grouped_allreduce([tf.ones(5), tf.ones(shape, dtype), tf.ones(3)], name="bad")

    refused(way, group(17 + RANK, 17), "shape")
    refused(way, group(17, 18) if ODD else group(306), "shape")
    refused(way, group(17, dtype=tf.int32 if ODD else tf.float32), "type")


def test_grouped_cpu_and_gpu_mix() -> None:
    """This is not an error here, as for single tensors."""
    card = f"/gpu:{gpu()}"
    mixed = []
    for number in range(5):
        with tf.device(card if number % 2 else "/cpu:0"):
            mixed.append(tf.ones(17) * number)
    for number, entry in enumerate(hvd.grouped_allreduce(mixed, op=hvd.Sum)):
        assert value(entry).tolist() == [SIZE * number] * 17


@kinds
def test_grouped_gradient(way: Any, kind: str) -> None:
    options, want = GRADIENTS[kind]
    for dtype in WITH_GRADIENT:
        group = [draw(dtype, 2, seed=1234 + number) for number in range(5)]
        check_gradients(way, lambda x: hvd.grouped_allreduce(x, **options), group, [want] * 5)


# IndexedSlices: the rows of all ranks, in rank order.


def slices(values: Any, indices: Any) -> Any:
    return tf.IndexedSlices(values, indices, dense_shape=tf.constant([40, 17]))


@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_indexed_slices(way: Any, op: str, grouped: bool) -> None:
    """Each rank has rows rank and 39. A group also has a different number of rows, and a dense tensor."""
    dense = tf.ones((2, 3))
    inputs = [tf.ones((2, 17)) * (RANK + 1.0), tf.constant([RANK, 39]), dense]

    def reduce(values: Any, indices: Any, other: Any) -> Any:
        if not grouped:
            result = hvd.allreduce(slices(values, indices), op=getattr(hvd, op))
            assert isinstance(result, tf.IndexedSlices)
            return tf.convert_to_tensor(result), result.dense_shape
        group = [slices(values, indices), other, slices(values[: RANK % 2], indices[: RANK % 2])]
        first, second, third = hvd.grouped_allreduce(group, op=getattr(hvd, op))
        assert isinstance(first, tf.IndexedSlices)
        assert isinstance(third, tf.IndexedSlices)
        return tf.convert_to_tensor(first), first.dense_shape, second, tf.convert_to_tensor(third)

    got = way(reduce, *inputs)
    divisor = SIZE if op == "Average" else 1
    want, few = np.zeros((40, 17), np.float32), np.zeros((40, 17), np.float32)
    for rank in range(SIZE):
        want[[rank, 39]] += (rank + 1) / divisor
        few[rank] += (rank % 2) * (rank + 1) / divisor
    near(got[0], want)
    assert value(got[1]).tolist() == [40, 17]
    if grouped:
        near(got[2], np.full((2, 3), SIZE / divisor, np.float32))
        near(got[3], few)


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_indexed_slices_with_other_operations(way: Any, op: str) -> None:
    tensor = slices(tf.ones((2, 17)), tf.constant([1, 2]))
    # Adasum may be refused for three ranks before the slices are checked.
    words = "Average" if op == "Adasum" and SIZE & (SIZE - 1) else "Average or Sum"
    for kind in (hvd.allreduce, lambda one, **how: hvd.grouped_allreduce([tf.ones(2), one], **how)):
        with pytest.raises(NotImplementedError, match=words):
            way(lambda kind=kind: kind(tensor, op=getattr(hvd, op)))


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
def test_indexed_slices_with_factors(way: Any, factor: str) -> None:
    tensor = slices(tf.ones((2, 17)), tf.constant([1, 2]))
    for kind in (hvd.allreduce, lambda one, **how: hvd.grouped_allreduce([tf.ones(2), one], **how)):
        with pytest.raises(NotImplementedError, match=factor):
            way(lambda kind=kind: kind(tensor, op=hvd.Sum, **{factor: 0.5}))
