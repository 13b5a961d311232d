"""Gradients of the collectives follow the contract, eagerly and in functions, and wrong calls raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from by_numpy import all_values, rows_of, values

import ringdance.tensorflow as hvd
from ringdance.errors import ArgumentError, CollectiveError, MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
both = pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "graph"])
OPS = {"sum": hvd.Sum, "average": hvd.Average}


def gradient_of(way: Any, kind: Callable[[Any], Any], given: Any, weights: Any) -> Any:
    """Return the gradient of the weighted sum of the collective's results. Each result has a weight."""

    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = kind(x)
            listed = results if isinstance(results, list) else [results]
            loss = tf.add_n([tf.reduce_sum(item * w) for item, w in zip(listed, weights, strict=True)])
        return tape.gradient(loss, x)

    return way(compute)(given).numpy()


def mine(shape: tuple[int, ...], seed: int = 0) -> Any:
    return tf.constant(values(RANK, "float64", shape, seed))


@both
@pytest.mark.parametrize("op", OPS)
def test_allreduce(way: Any, op: str) -> None:
    wanted = sum(all_values(SIZE, "float64", (4, 3), 1)) / (SIZE if op == "average" else 1)
    got = gradient_of(way, lambda x: hvd.allreduce(x, op=OPS[op]), mine((4, 3)), [mine((4, 3), 1)])
    np.testing.assert_allclose(got, wanted)
    scaled = gradient_of(
        way, lambda x: hvd.allreduce(x, op=OPS[op], prescale_factor=2.0, postscale_factor=3.0, name="scaled"),
        mine((4, 3)), [mine((4, 3), 1)],
    )
    np.testing.assert_allclose(scaled, 6 * wanted)


@several
@both
def test_what_is_not_linear_has_no_gradient(way: Any) -> None:
    def total(x: Any, stop: Any) -> Any:
        return x + sum(stop(hvd.allreduce(x, op=op)) for op in (hvd.Min, hvd.Max, hvd.Product))

    with pytest.raises(ArgumentError, match=rf"on rank {RANK}: .* so use Average or Sum"):
        gradient_of(way, lambda x: total(x, tf.identity), mine((4,)), [1.0])
    got = gradient_of(way, lambda x: total(x, tf.stop_gradient), mine((4,)), [1.0])
    np.testing.assert_array_equal(got, 1.0)


@both
@pytest.mark.parametrize("op", OPS)
def test_grouped_allreduce(way: Any, op: str) -> None:
    both_weights = [mine((4, 3), 1), mine((4, 3), 2)]
    wanted = sum(all_values(SIZE, "float64", (4, 3), 1)) + 5 * sum(all_values(SIZE, "float64", (4, 3), 2))
    got = gradient_of(
        way, lambda x: hvd.grouped_allreduce([x, 5 * x], op=OPS[op]), mine((4, 3)), both_weights
    )
    np.testing.assert_allclose(got, wanted / (SIZE if op == "average" else 1))


@both
def test_allgather(way: Any) -> None:
    rows = [5, 0, 3, 1][:SIZE]
    total = (sum(rows), 2)
    mean = sum(all_values(SIZE, "float64", total, 1)) / SIZE
    start = sum(rows[:RANK])
    got = gradient_of(way, hvd.allgather, mine((rows[RANK], 2)), [mine(total, 1)])
    np.testing.assert_allclose(got, mean[start : start + rows[RANK]])
    got = gradient_of(
        way, lambda x: hvd.grouped_allgather([x, 2 * x]), mine((rows[RANK], 2)), [mine(total, 1)] * 2
    )
    np.testing.assert_allclose(got, 3 * mean[start : start + rows[RANK]])


@both
def test_broadcast(way: Any) -> None:
    mean = sum(all_values(SIZE, "float64", (2, 3), 1)) / SIZE
    for root in range(SIZE):
        got = gradient_of(
            way, lambda x, root=root: hvd.broadcast(x, root), mine((2, 3)), [mine((2, 3), 1)]
        )
        np.testing.assert_allclose(got, mean if root == RANK else 0 * mean)


@both
def test_alltoall(way: Any) -> None:
    """Each rank sends rank + 1 rows to each rank, and keeps one row that is not sent."""
    weights = [values(r, "float64", (SIZE * (SIZE + 1) // 2, 2), 1) for r in range(SIZE)]
    starts = np.cumsum([0, *range(1, SIZE + 1)])
    wanted = np.concatenate([w[starts[RANK] : starts[RANK + 1]] for w in weights] + [np.zeros((1, 2))])
    tensor = mine((SIZE * (RANK + 1) + 1, 2))
    got = gradient_of(
        way, lambda x: hvd.alltoall(x, [RANK + 1] * SIZE)[0], tensor, [tf.constant(weights[RANK])]
    )
    np.testing.assert_allclose(got, wanted)
    equal = gradient_of(way, hvd.alltoall, mine((SIZE, 2)), [mine((SIZE, 2), 1)])
    every = all_values(SIZE, "float64", (SIZE, 2), 1)
    np.testing.assert_allclose(equal, np.stack([value[RANK] for value in every]))


@both
@pytest.mark.parametrize("op", OPS)
def test_reducescatter(way: Any, op: str) -> None:
    rows = 2 * SIZE + 1
    parts = [rows_of(r, rows, SIZE) for r in range(SIZE)]
    lengths = [part.stop - part.start for part in parts]
    gathered = np.concatenate([values(r, "float64", (n, 2), 1) for r, n in enumerate(lengths)])
    factor = 2.0 * (SIZE if op == "sum" else 1)
    got = gradient_of(
        way, lambda x: hvd.reducescatter(x, op=OPS[op], prescale_factor=2.0), mine((rows, 2)),
        [mine((lengths[RANK], 2), 1)],
    )
    np.testing.assert_allclose(got, factor * gathered)
    got = gradient_of(
        way, lambda x: hvd.grouped_reducescatter([x], op=OPS[op], postscale_factor=2.0), mine((rows, 2)),
        [mine((lengths[RANK], 2), 1)],
    )
    np.testing.assert_allclose(got, factor * gathered)


@both
def test_gradient_of_a_gradient(way: Any) -> None:
    def compute(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                cube = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, name="cube") ** 3)
            first = inner.gradient(cube, x)
        return outer.gradient(first, x)

    # Each backward pass sums over the ranks: sum_r 3 s^2, then SIZE * sum_r 6 s.
    total = sum(range(1, SIZE + 1))
    assert way(compute)(tf.constant([RANK + 1.0])).numpy().tolist() == [6.0 * total * SIZE * SIZE]


# Errors. In a graph, TensorFlow's error contains our text, with ranks and hosts.

MISMATCHES = {
    "shape": lambda: hvd.allreduce(tf.zeros((2, RANK + 1)), name="bad"),
    "dimensions": lambda: hvd.allreduce(tf.zeros((1,) * (RANK + 1)), name="bad"),
    "type": lambda: hvd.allreduce(tf.zeros(2, [tf.float32, tf.float64][RANK % 2]), name="bad"),
    "operation": lambda: hvd.allreduce(tf.zeros(2), op=[hvd.Sum, hvd.Max][RANK % 2], name="bad"),
    "scale": lambda: hvd.allreduce(tf.zeros(2), prescale_factor=RANK + 1.0, name="bad"),
    "group": lambda: hvd.grouped_allreduce([tf.zeros(RANK + 1), tf.zeros(2)], name="bad"),
    "gathered shape": lambda: hvd.allgather(tf.zeros((2, RANK + 1)), name="bad"),
    "gathered type": lambda: hvd.allgather(tf.zeros(2, [tf.int32, tf.int64][RANK % 2]), name="bad"),
    "broadcast shape": lambda: hvd.broadcast(tf.zeros(RANK + 1), 0, name="bad"),
    "broadcast type": lambda: hvd.broadcast(tf.zeros(2, [tf.int32, tf.uint8][RANK % 2]), 0, name="bad"),
    "root": lambda: hvd.broadcast(tf.zeros(2), RANK, name="bad"),
    "sent type": lambda: hvd.alltoall(tf.zeros(SIZE, [tf.int32, tf.int64][RANK % 2]), name="bad"),
    "sent shape": lambda: hvd.alltoall(tf.zeros((SIZE, RANK + 1)), name="bad"),
    "scattered shape": lambda: hvd.reducescatter(tf.zeros((SIZE, RANK + 1)), name="bad"),
    "scattered type": lambda: hvd.reducescatter(tf.zeros(2, [tf.float32, tf.float64][RANK % 2]), name="bad"),
}  # fmt: skip


@several
@both
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatches_raise_on_all(way: Any, kind: str) -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"on ranks? 0.* on host .*rank") as caught:
        way(MISMATCHES[kind])()
    assert isinstance(caught.value, MismatchError) == (way is not tf.function)
    assert way(lambda: hvd.allreduce(tf.ones(2), op=hvd.Sum, name="bad"))().numpy().tolist() == [SIZE] * 2


@several
@both
def test_tensors_without_dimensions(way: Any) -> None:
    def call(kind: Any) -> Any:  # not a lambda: AutoGraph would parse the whole file
        return kind(tf.constant(1.0), name="scalar")

    for kind in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(tf.errors.FailedPreconditionError, match="at least one dimension"):
            way(partial(call, kind))()


@both
def test_wrong_arguments(way: Any) -> None:
    """Each rank detects these errors on its own."""
    wrong = [
        lambda: hvd.alltoall(tf.zeros(SIZE), [1] * (SIZE + 1), name="bad"),
        lambda: hvd.alltoall(tf.zeros(SIZE), [SIZE + 1] * SIZE, name="bad"),
        lambda: hvd.alltoall(tf.zeros(SIZE), [-1] * SIZE, name="bad"),
        lambda: hvd.broadcast(tf.zeros(2), SIZE, name="bad"),
    ]
    if SIZE > 1:
        wrong.append(lambda: hvd.alltoall(tf.zeros(SIZE + 1), name="bad"))
    for call in wrong:
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            way(call)()
        assert "rank" in str(caught.value)
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(tf.errors.AbortedError, match="Sum and Average"):
            way(lambda op=op: hvd.reducescatter(tf.zeros(SIZE), op=op))()
    assert way(lambda: hvd.allreduce(tf.ones(1), op=hvd.Sum))().numpy().tolist() == [SIZE]


def test_splits_must_be_integers() -> None:
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError)):
        hvd.alltoall(tf.zeros(SIZE), [0.5] * SIZE)


def test_a_compiled_function_says_so() -> None:
    function = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    with pytest.raises(ArgumentError, match="jit_compile=False"):
        function(tf.ones(2))
    inner = tf.function(lambda x: 2 * x, jit_compile=True)
    around = tf.function(lambda x: hvd.allreduce(inner(x), op=hvd.Sum))
    assert around(tf.ones(2)).numpy().tolist() == [2 * SIZE] * 2


@several
def test_eager_errors_are_of_both_families() -> None:
    with pytest.raises(CollectiveError):
        hvd.allreduce(tf.zeros(RANK + 1), name="both")
    with pytest.raises(RuntimeError):
        hvd.allreduce(tf.zeros(RANK + 1), name="both")
    with pytest.raises(ValueError, match="not exceed"):
        hvd.alltoall(tf.zeros(SIZE), [SIZE] * SIZE, name="both")


@pytest.mark.parametrize("masked", [False, True])
def test_batch_normalization_far_from_zero(masked: bool) -> None:
    inputs = [np.random.default_rng(rank).normal(1000, 0.05, (50 + rank, 1, 2)) for rank in range(SIZE)]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    mask = np.ones((len(inputs[RANK]), 1), bool) if masked else None
    layer(inputs[RANK].astype("float32"), training=True, mask=mask)
    variance = np.concatenate(inputs).astype("float32").astype(float).var((0, 1))
    np.testing.assert_allclose(layer.moving_variance, variance, rtol=1e-3)


def test_batch_normalization_in_double_precision() -> None:
    inputs = [np.random.default_rng(rank).normal(1e8, 1, (50 + rank, 2)) for rank in range(SIZE)]
    layer = hvd.SyncBatchNormalization(momentum=0.0, dtype="float64")
    layer(inputs[RANK], training=True)
    np.testing.assert_allclose(layer.moving_variance, np.concatenate(inputs).var(0), rtol=1e-6)


@pytest.mark.ranks(2, 3, 4)
def test_batch_normalization_with_a_mask_and_no_rows_on_a_rank() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 2, 3)).astype("float32")
    own = rows if RANK == 0 else rows[:0]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(own, training=True, mask=np.ones((len(own), 2), bool))
    np.testing.assert_allclose(layer.moving_variance, rows.var((0, 1)), rtol=1e-4)
