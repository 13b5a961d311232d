"""Shares of data sets over several epochs, whatever of them is read: each sample once in each."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import tensorflow as tf
from sampled import sampled

from ringdance.tensorflow.data import sharding

SIZE = 3


def shares(monkeypatch: pytest.MonkeyPatch, count: int, known: bool, shuffled: bool, **options: Any) -> Any:
    """Return the data set of each rank."""
    found = []
    for rank in range(SIZE):
        monkeypatch.setattr(sharding, "check_plan", lambda *_, rank=rank: (rank, SIZE))
        data = tf.data.Dataset.range(count)
        if shuffled:  # by the script, before it is divided
            data = data.shuffle(count, seed=3)
        if not known:
            data = data.filter(lambda _: True)
        found.append(sharding.shard(data, **options))
    return found


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
        every = [one.prefetch(2) if interrupted else one for one in every]
        kept = count // SIZE * SIZE if ends == "drop" else count
        for _ in range(3):
            for rank, one in enumerate(every if interrupted else ()):  # only some come to the end
                list(one.take(2 + rank))
            read = [[int(value) for value in one] for one in every]
            times = Counter(value for one in read for value in one)
            assert len(times) == kept
            assert ends != "pad" or sum(times.values()) == -(-count // SIZE) * SIZE
            assert ends == "pad" or set(times.values()) == {1}


@pytest.mark.parametrize("count", [0, 1, 2, 4097])
def test_rows_are_shuffled_without_a_buffer(count: int) -> None:
    data = sharding.permuted(tf.data.Dataset.range(count), count, 3)
    first, second = [[int(value) for value in data] for _ in range(2)]
    assert sorted(first) == sorted(second) == list(range(count))
    assert len(data) == count
    assert first != second or count < 3
    again = [int(value) for value in sharding.permuted(tf.data.Dataset.range(count), count, 3)]
    assert again == first


def test_elements_of_any_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "check_plan", lambda *_: (1, 2))
    rows = [[1, 2, 3], [4], []]
    data = tf.data.Dataset.from_generator(
        lambda: ({"row": row, "text": str(row)} for row in rows),
        output_signature={"row": tf.TensorSpec([None], tf.int32), "text": tf.TensorSpec([], tf.string)},
    )
    read = [one["row"].numpy().tolist() for one in sharding.shard(data, ends="pad")]
    assert read == [[4], [1, 2, 3]]
