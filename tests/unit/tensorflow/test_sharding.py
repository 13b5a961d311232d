"""Shares of data sets over several epochs: each epoch has each sample once, however much is read."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from sampled import sampled

from ringdance.errors import ArgumentError
from ringdance.tensorflow.data import sharding
from ringdance.training.sharding import Shard

SIZE = 3


def shares(monkeypatch: pytest.MonkeyPatch, count: int, known: bool, shuffled: bool, **options: Any) -> Any:
    """Return each rank's data set."""
    parts = []
    for rank in range(SIZE):
        monkeypatch.setattr(sharding, "check_plan", lambda *_, rank=rank: (rank, SIZE))
        data = tf.data.Dataset.range(count)
        if shuffled:  # the script shuffles before it shards
            data = data.shuffle(count, seed=3)
        if not known:
            data = data.filter(lambda _: True)
        parts.append(sharding.shard(data, **options))
    return parts


PLANS = [
    (True, "strided", True), (True, "contiguous", True), (True, "contiguous", 5), (False, "strided", 5),
    (True, "contiguous", False), (True, "strided", False), (False, "strided", False),
]  # fmt: skip
SHARES = list(product(PLANS, ("pad", "drop", "join"), (False, True)))


@pytest.mark.parametrize("case", sampled("shares of data sets", SHARES, 6), ids=str)
def test_each_sample_once_in_each_epoch(
    monkeypatch: pytest.MonkeyPatch, case: tuple[tuple[bool, str, Any], str, bool]
) -> None:
    (known, layout, shuffle), ends, interrupted = case
    for count in (11, 12, 4 if ends == "drop" else 2):
        every = shares(
            monkeypatch, count, known, not shuffle, ends=ends, shuffle=shuffle, seed=1, layout=layout
        )
        every = [part.prefetch(2) if interrupted else part for part in every]
        kept = count // SIZE * SIZE if ends == "drop" else count
        for _ in range(3):
            for rank, part in enumerate(every if interrupted else ()):  # only some ranks reach the end
                list(part.take(2 + rank))
            read = [[int(value) for value in part] for part in every]
            times = Counter(value for part in read for value in part)
            assert len(times) == kept
            assert ends != "pad" or sum(times.values()) == -(-count // SIZE) * SIZE
            assert ends == "pad" or set(times.values()) == {1}


@pytest.mark.parametrize("count", [0, 1, 2, 4097])
def test_rows_are_shuffled_without_a_buffer(count: int) -> None:
    first, second = [
        [[int(value) for value in sharding.shuffled_rows(Shard(count, ends="join", rank=rank, size=2), 3)]
         for rank in range(2)] for _ in range(2)
    ]  # fmt: skip
    assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == list(range(count))
    plan = Shard(count, ends="join", rank=0, size=1)
    rows = sharding.shuffled_rows(plan, 3)
    read = [[int(value) for value in rows] for _ in range(2)]
    assert read[0] != read[1] or count < 3
    assert [int(value) for value in sharding.shuffled_rows(plan, 3)] == read[0]
    mixed = [int(value) for value in sharding.shuffled_rows(plan, 4)]
    assert mixed != read[0] or count < 3


@pytest.mark.parametrize("known", [True, False])
def test_a_look_on_one_rank_alone_misses_nothing(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    every = shares(monkeypatch, 12, known, False, ends="drop", shuffle=5)
    tensors = []
    for rank in range(SIZE):
        monkeypatch.setattr(sharding, "check_plan", lambda *_, rank=rank: (rank, SIZE))
        tensors.append(sharding.shard(tf.range(12), ends="drop", shuffle=True))
    for kind in (every, tensors):
        orders = set()
        for epoch in range(4):
            next(iter(kind[epoch % SIZE]))
            read = [[int(value) for value in part] for part in kind]
            assert sorted(value for part in read for value in part) == list(range(12))
            orders.add(str(read))
        assert len(orders) > 1


def test_an_order_that_each_rank_draws_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "part").touch()
    files = str(tmp_path / "*")
    numbers = tf.data.Dataset.range(9)
    monkeypatch.setattr(sharding, "check_plan", lambda *_: (0, SIZE))
    for data in (numbers.shuffle(9).batch(2), tf.data.Dataset.zip(numbers, numbers.shuffle(9)),
                 tf.data.Dataset.list_files(files)):  # fmt: skip
        with pytest.raises(ArgumentError, match="without a seed"):
            sharding.shard(data, ends="pad")
    for data in (numbers.shuffle(9, seed=1).batch(2), tf.data.Dataset.list_files(files, shuffle=False)):
        sharding.shard(data, ends="pad")
    monkeypatch.setattr(sharding, "check_plan", lambda *_: (0, 1))
    sharding.shard(numbers.shuffle(9), ends="pad")


def test_elements_of_any_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "check_plan", lambda *_: (1, 2))
    rows = [[1, 2, 3], [4], []]
    data = tf.data.Dataset.from_generator(
        lambda: ({"row": row, "text": str(row)} for row in rows),
        output_signature={"row": tf.TensorSpec([None], tf.int32), "text": tf.TensorSpec([], tf.string)},
    )
    read = [element["row"].numpy().tolist() for element in sharding.shard(data, ends="pad")]
    assert read == [[4], [1, 2, 3]]
