"""shard() for TensorFlow: tensors, and data sets of known, unknown and infinite length."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd
from ringdance.errors import ArgumentError, MismatchError
from ringdance.training.sharding import Shard

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LENGTHS = [1, 2, 3, 5, 6, 7, 12]


def known(length: int) -> Any:
    return tf.data.Dataset.range(length)


def unknown(length: int) -> Any:
    result = tf.data.Dataset.range(length).filter(lambda _: True)
    assert result.cardinality() == tf.data.UNKNOWN_CARDINALITY
    return result


def mine(data: Any) -> list[Any]:
    return list(data.as_numpy_iterator())


@pytest.mark.parametrize(("make", "layout"), [
    (known, "strided"), (unknown, "contiguous"),
    pytest.param(known, "contiguous", marks=pytest.mark.slow),
    pytest.param(unknown, "strided", marks=pytest.mark.slow),
])
@pytest.mark.parametrize("ends", ["pad", "drop", "join"])
def test_the_same_plan_as_for_indices(ends: str, make: Any, layout: str) -> None:
    if make is unknown and layout == "contiguous":
        with pytest.raises(ArgumentError, match="known number of elements"):
            hvd.shard(unknown(9), ends=ends, layout=layout)
        return
    for length in LENGTHS:
        if ends == "drop" and length < SIZE:
            continue
        plan = Shard(length, ends=ends, layout=layout, rank=RANK, size=SIZE)
        data = hvd.shard(make(length), ends=ends, layout=layout)
        assert mine(data) == mine(data) == plan.indices().tolist()


@pytest.mark.parametrize("ends", ["pad", "drop"])
def test_elements_of_any_structure(ends: str) -> None:
    whole = {"x": np.arange(14.0).reshape(7, 2), "y": (np.arange(7), np.array([str(n) for n in range(7)]))}
    data = tf.data.Dataset.from_tensor_slices(whole).filter(lambda _: True)
    result = mine(hvd.shard(data, ends=ends))
    plan = Shard(7, ends=ends, rank=RANK, size=SIZE)
    assert [value["y"][0] for value in result] == plan.indices().tolist()
    assert [value["x"].tolist() for value in result] == whole["x"][plan.indices()].tolist()
    assert [value["y"][1].decode() for value in result] == [str(n) for n in plan.indices()]


def test_an_endless_data_set() -> None:
    for ends in ("pad", "drop", "join"):
        result = mine(hvd.shard(tf.data.Dataset.range(4).repeat(), ends=ends).take(6))
        assert result == [place % 4 for place in range(RANK, RANK + 6 * SIZE, SIZE)]


@pytest.mark.parametrize("buffer", [True, 5])
@pytest.mark.parametrize("ends", ["pad", "drop", "join"])
def test_shuffled(ends: str, buffer: bool | int) -> None:
    """Each iteration is another epoch, and the ranks' shares belong to the same order."""
    length = 5 * SIZE + 1
    data = hvd.shard(tf.data.Dataset.range(length), ends=ends, shuffle=buffer, seed=4)
    check_epochs(data, length, ends)


@pytest.mark.parametrize("ends", ["pad", "drop", "join"])
def test_shuffled_tensors(ends: str) -> None:
    length = 5 * SIZE + 1
    data = hvd.shard(tf.range(length), ends=ends, shuffle=True, seed=4)
    check_epochs(data, length, ends)
    plan = Shard(length, ends=ends, rank=RANK, size=SIZE)
    tensors = {"a": tf.range(length), "b": np.ones((length, 2))}
    in_order = hvd.shard(tensors, ends=ends)
    assert in_order.cardinality() == len(plan)
    result = mine(in_order)
    assert [value["a"] for value in result] == plan.indices().tolist()
    assert result[0]["b"].shape == (2,)


def check_epochs(data: Any, length: int, ends: str) -> None:
    epochs = []
    for _ in range(3):
        gathered = hvd.allgather_object([int(rank) for rank in mine(data.batch(2).unbatch())])
        seen = Counter(itertools.chain(*gathered))
        if ends == "drop":
            assert set(seen.values()) == {1}
            assert len(seen) == length // SIZE * SIZE
        else:
            assert sorted(seen) == list(range(length))
        assert seen.total() == {"pad": -(-length // SIZE) * SIZE, "join": length}.get(ends, len(seen))
        epochs.append(gathered)
    assert epochs[0] != epochs[1] != epochs[2]


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="pass a buffer size"):
        hvd.shard(unknown(9), ends="pad", shuffle=True)
    with pytest.raises(ArgumentError, match="same number of rows"):
        hvd.shard((tf.zeros(3), tf.zeros(4)), ends="pad")
    with pytest.raises(ArgumentError, match=r"'pad' .* 'drop' .* 'join'"):
        hvd.shard(known(9), ends="repeat")


@pytest.mark.ranks(2, 3, 4)
def test_different_orders_are_noticed() -> None:
    tf.random.set_seed(RANK)
    try:
        with pytest.raises(MismatchError, match="set_seed"):
            hvd.shard(known(9), ends="pad", shuffle=True)
    finally:
        tf.random.set_seed(0)
    with pytest.raises(MismatchError, match="the number of elements differs"):
        hvd.shard(known(9 + RANK), ends="pad")


@pytest.mark.parametrize("ends", ["drop", "join"])
def test_elements_that_can_be_read_once_and_tuples_of_one(ends: str) -> None:
    once = iter(range(10))
    data = tf.data.Dataset.from_generator(lambda: once, output_signature=tf.TensorSpec((), tf.int64))
    shared = hvd.shard(data, ends=ends)
    assert next(once) == 0  # nothing is read before this
    once = itertools.chain([0], once)
    result = sorted(itertools.chain(*hvd.allgather_object([int(item) for item in shared])))
    assert result == list(range(10 // SIZE * SIZE if ends == "drop" else 10))
    single = tf.data.Dataset.from_tensor_slices((np.arange(7),)).filter(lambda _: True)
    plan = Shard(7, ends=ends, rank=RANK, size=SIZE)
    assert [int(value) for (value,) in mine(hvd.shard(single, ends=ends))] == plan.indices().tolist()
