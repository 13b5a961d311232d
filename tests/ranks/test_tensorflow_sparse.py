"""IndexedSlices over the ranks: merged, sent as rows or as a dense table, eagerly and in functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from other_settings import other_settings

import ringdance.tensorflow as hvd
from ringdance.training.gradients.sparse import merge

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TABLE = 40


def eager(function: Any) -> Any:
    return function


both = pytest.mark.parametrize("way", [eager, tf.function], ids=["eager", "function"])


@pytest.fixture(params=["auto", "rows", "dense"])
def route(request: pytest.FixtureRequest) -> Any:
    with other_settings({"RINGDANCE_SPARSE": request.param}):
        yield request.param


def rows_of(rank: int, dtype: Any) -> tuple[Any, Any]:
    """Return rows with repetitions. Later ranks have more of them."""
    made = np.random.default_rng(rank)
    count = 3 * rank + 4
    keys = np.concatenate([[5, 5], made.integers(0, TABLE, count)])
    return keys, made.integers(-5, 6, (count + 2, 3)).astype(dtype)


def wanted(dtype: Any) -> tuple[Any, Any]:
    parts = [rows_of(rank, dtype) for rank in range(SIZE)]
    return merge(np.concatenate([keys for keys, _ in parts]), np.concatenate([values for _, values in parts]))


@pytest.mark.ranks(2, 3, 4)
@both
@pytest.mark.parametrize("kind", [tf.int32, tf.int64])
@pytest.mark.parametrize("known", [True, False], ids=["shape", "no shape"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_the_verb(way: Any, route: str, dtype: str, known: bool, kind: Any) -> None:
    keys, values = rows_of(RANK, dtype)
    shape = tf.constant([TABLE, 3], tf.int64) if known else None
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, SIZE)):

        @way
        def call(keys: Any, values: Any, op: int = op) -> Any:
            result = hvd.allreduce(tf.IndexedSlices(values, keys, shape), op=op)
            assert (result.dense_shape is None) is not known
            return result.values, result.indices

        results, places = call(tf.constant(keys, kind), tf.constant(values))
        all_keys, sums = wanted(dtype)
        assert places.dtype == kind
        assert places.numpy().tolist() == all_keys.tolist()
        fractions = dtype == "int64" and op == hvd.Average
        assert results.dtype == (tf.float64 if fractions else dtype)
        np.testing.assert_allclose(results.numpy(), sums / divisor, rtol=1e-3 if dtype == "float16" else 1e-6)


@both
def test_gradients_of_embeddings(way: Any, route: str) -> None:
    """Gradients are right with repeated words, two tables and a dense layer."""
    words = tf.Variable(tf.random.stateless_normal((TABLE, 4), [1, 1]), name="words")
    users = tf.Variable(tf.random.stateless_normal((100_000, 2), [2, 2]), name="users")
    weight = tf.Variable(tf.ones((6, 1)), name="weight")

    def loss_of(rank: int) -> Any:
        places = tf.constant([rank, 7, 7, 9])
        mixed = tf.concat([tf.gather(words, places), tf.gather(users, places * 1000)], 1)
        return tf.reduce_sum((mixed @ weight) ** 2) * (rank + 1.0)

    @way
    def reduced() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(RANK)
        results = hvd.DistributedGradientTape(tape).gradient(loss, [words, users, weight])
        assert isinstance(results[0], tf.IndexedSlices)
        assert isinstance(results[1], tf.IndexedSlices)
        return [tf.convert_to_tensor(tensor) for tensor in results], results[0].indices

    with tf.GradientTape() as tape:
        joined = tf.add_n([loss_of(rank) for rank in range(SIZE)]) / SIZE
    expected = tape.gradient(joined, [words, users, weight])
    for _ in range(2):
        result, places = reduced()
        for mine, item in zip(result, expected, strict=True):
            np.testing.assert_allclose(mine.numpy(), tf.convert_to_tensor(item).numpy(), rtol=1e-5, atol=1e-5)
    if SIZE > 1:
        assert places.numpy().tolist() == sorted({7, 9, *range(SIZE)})


@both
def test_differentiable(way: Any, route: str) -> None:
    """The gradient of a sum is the sum of the gradients. An average's gradient is their average."""
    keys = tf.constant([RANK, 5, 5])
    values = tf.Variable(tf.ones((3, 2)))
    factors = tf.reshape(tf.range(2.0 * TABLE), (TABLE, 2))
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, SIZE)):

        @way
        def call(op: int = op) -> Any:
            with tf.GradientTape() as tape:
                tensor = tf.IndexedSlices(tf.convert_to_tensor(values), keys, tf.constant([TABLE, 2]))
                result = hvd.allreduce(tensor, op=op)
                picked = tf.gather(factors, result.indices) * (RANK + 1.0)
                loss = tf.reduce_sum(result.values * picked)
            return tape.gradient(loss, values)

        total = SIZE * (SIZE + 1) / 2 / divisor
        np.testing.assert_allclose(call().numpy(), tf.gather(factors, keys).numpy() * total, rtol=1e-6)


@pytest.mark.ranks(2, 3)
def test_a_rank_that_joins_while_others_train_a_table() -> None:
    table = tf.Variable(tf.zeros((1000, 2)))
    for step in range(2 + RANK):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [step]))
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [table])
        dense = tf.convert_to_tensor(gradient).numpy()
        present = SIZE if step < 2 else SIZE - (step - 1)
        np.testing.assert_allclose(dense[step], [present / SIZE] * 2, rtol=1e-6)
    assert int(hvd.join()) == SIZE - 1
