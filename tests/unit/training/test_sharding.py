"""Which samples belong to which rank: lengths 0 to 50, 1 to 5 ranks, all ends, layouts and orders."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from loopback_job import job
from sampled import sampled

from ringdance.errors import ArgumentError, MismatchError
from ringdance.training.process_sets import ProcessSet, add_process_set
from ringdance.training.sharding import Shard, shard

LENGTHS = range(51)
SIZES = range(1, 6)


def shares(length: int, size: int, epoch: int = 0, **options: object) -> list[list[int]]:
    parts = []
    for rank in range(size):
        share = Shard(length, rank=rank, size=size, **options)  # type: ignore[arg-type]
        share.set_epoch(epoch)
        indices = share.indices()
        assert indices.dtype == np.int64
        assert len(share) == len(indices)
        assert list(share) == indices.tolist()
        assert [number for batch in share.batches(3) for number in batch] == indices.tolist()
        parts.append(indices.tolist())
    return parts


def check_guarantee(found: list[list[int]], length: int, ends: str) -> None:
    """Check what each mode promises, without the formulas of the plan."""
    size = len(found)
    seen = Counter(itertools.chain(*found))
    counts = [len(part) for part in found]
    assert set(seen) <= set(range(length))
    if ends == "join":
        assert sorted(seen) == list(range(length))
        assert set(seen.values()) <= {1}
        assert max(counts) - min(counts) <= 1
        return
    assert len(set(counts)) == 1
    if ends == "drop":
        assert set(seen.values()) <= {1}
        assert length - len(seen) < size
        return
    assert sorted(seen) == list(range(length))
    assert sum(counts) - length < size
    if length:
        assert max(seen.values()) - min(seen.values()) <= 1


WAYS = list(itertools.product(["pad", "drop", "join"], ["strided", "contiguous"], [False, True]))


@pytest.mark.parametrize("way", sampled("every sample once", WAYS, 4), ids=str)
def test_every_sample_once(way: tuple[str, str, bool]) -> None:
    ends, layout, shuffle = way
    for length, size in itertools.product(LENGTHS, SIZES):
        if ends == "drop" and 0 < length < size:
            with pytest.raises(ArgumentError, match="would skip all samples"):
                shares(length, size, ends=ends)
            continue
        found = shares(length, size, ends=ends, layout=layout, shuffle=shuffle, seed=3)
        check_guarantee(found, length, ends)
        if shuffle:
            continue
        parts = itertools.zip_longest(*found) if layout == "strided" else found
        order = [number for number in itertools.chain(*parts) if number is not None]
        assert order[:length] == list(range(length))[: len(order)]


def test_shuffled_orders() -> None:
    """Orders differ between epochs and seeds, and repeat for the same epoch and seed."""
    options = {"ends": "join", "shuffle": True}
    orders = {
        tuple(itertools.chain(*shares(20, 2, epoch=epoch, seed=seed, **options)))
        for seed in (0, 1)
        for epoch in range(5)
    }
    assert len(orders) == 10
    assert shares(20, 2, epoch=4, seed=1, **options) == shares(20, 2, epoch=4, seed=1, **options)
    # NumPy has frozen this generator, so a training run that continues elsewhere sees the same order.
    assert shares(8, 1, seed=7, epoch=2, **options) == [[7, 6, 4, 1, 5, 2, 0, 3]]
    shard_ = Shard(20, ends="pad", shuffle=True, rank=0, size=2)
    assert shard_.indices(3).tolist() != shard_.indices().tolist()


def test_dropped_samples_change_with_the_epoch() -> None:
    seen = [set(itertools.chain(*shares(11, 4, epoch=n, ends="drop", shuffle=True))) for n in range(8)]
    assert all(len(part) == 8 for part in seen)
    assert set.union(*seen) == set(range(11))


def test_rows_of_arrays() -> None:
    x, y = np.arange(14).reshape(7, 2), np.arange(7)
    share = Shard(7, ends="drop", layout="contiguous", rank=1, size=2)
    first, second = share.take(x, y)
    assert second.tolist() == [3, 4, 5]
    assert first.tolist() == x[3:6].tolist()
    assert share.take(y).tolist() == [3, 4, 5]
    with pytest.raises(ArgumentError, match="6 rows instead of 7"):
        share.take(y[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ends": "cut"}, "'pad' .* 'drop' .* 'join'"),
        ({"ends": None}, "ends=None"),
        ({"length": -1}, "length=-1"),
        ({"length": 2.5}, "length=2.5"),
        ({"length": True}, "length=True"),
        ({"seed": -3}, "seed=-3"),
        ({"seed": 2**32}, "below 4294967296"),
        ({"layout": "zigzag"}, "'strided' or 'contiguous'"),
        ({"rank": 2}, "rank=2 is out of range for 2 ranks"),
        ({"rank": -1}, "rank=-1"),
        ({"size": None}, "both rank and size"),
        ({"ends": "join", "process_set": ProcessSet([0])}, "involves all ranks. Use 'pad' or 'drop'"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    arguments = {"length": 9, "ends": "pad", "rank": 0, "size": 2, **options}
    with pytest.raises(ArgumentError, match=message):
        Shard(**arguments)  # type: ignore[arg-type]


class Stream:
    """Like a loader or a sampler: has a length, but no samples by number."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize("data", [Stream(), (np.ones(9), np.ones(9)), {"x": np.ones(9)}, "train", iter([1])])
def test_what_has_no_samples_by_number(data: object) -> None:
    with pytest.raises(ArgumentError, match=f"a {type(data).__name__} has no numbered samples"):
        shard(data, ends="pad")


def test_wrong_numbers_later() -> None:
    share = Shard(9, ends="pad", rank=0, size=2)
    with pytest.raises(ArgumentError, match="epoch=-1"):
        share.set_epoch(-1)
    with pytest.raises(ArgumentError, match="batch_size must be at least 1"):
        list(share.batches(0))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_of_a_job(size: int) -> None:
    indices = job(size, lambda _: shard(np.zeros((10, 2)), ends="pad", shuffle=True).indices().tolist())
    assert indices == shares(10, size, ends="pad", shuffle=True)


def test_the_ranks_of_a_set() -> None:
    def program(engine: object) -> list[int]:
        some = add_process_set([0, 2])
        if engine.rank == 1:  # type: ignore[attr-defined]
            with pytest.raises(ArgumentError, match=r"Rank 1 .* is not a member .* with the ranks \[0, 2\]"):
                shard(5, ends="pad", process_set=some)
            return []
        return list(shard(5, ends="pad", process_set=some))

    assert job(3, program) == [[0, 2, 4], [], [1, 3, 0]]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (lambda rank: {"data": 10 + rank}, r"length differs .* \(rank 0: 10, rank 1: 11\)"),
        (lambda rank: {"seed": rank}, r"seed differs"),
        (lambda rank: {"ends": ["pad", "drop"][rank]}, r"ends differs .* rank 1: 'drop'"),
    ],
)
def test_different_arguments_are_noticed(options: object, what: str) -> None:
    def program(engine: object) -> None:
        kwargs = {"data": 10, "ends": "pad", **options(engine.rank)}  # type: ignore[attr-defined, operator]
        with pytest.raises(MismatchError, match=what):
            shard(**kwargs)
        assert len(shard(10, ends="pad")) == 5  # the job continues

    job(2, program)
