"""Shares of an epoch.

All expected shares are read by hand from Python's shuffles of range(10): seed 0 gives 7 8 1 5 3 4 2 0 9 6,
seed 1 gives 6 8 9 7 5 3 0 4 1 2, and seed 7 gives 8 3 1 4 7 0 9 6 2 5.
"""

from __future__ import annotations

import pytest
from loopback_job import job

from ringdance.errors import NotInitializedError
from ringdance.training.elastic import ElasticIndices

SEED_0 = [7, 8, 1, 5, 3, 4, 2, 0, 9, 6]


def shares(
    size: int, length: int = 10, epoch: int = 0, processed: int = 0, **options: object
) -> list[list[int]]:
    """Return the indices that each rank gets."""

    def program(_: object) -> list[int]:
        indices = ElasticIndices(length, **options)  # type: ignore[arg-type]
        indices.load_state_dict({"epoch": epoch, "processed_num": processed})
        share = list(indices)
        assert len(share) == len(indices) == indices.num_samples
        assert indices.total_size == size * indices.num_samples
        assert list(indices) == share  # iterating again gives the same indices
        return share

    return job(size, program)


def test_a_whole_epoch() -> None:
    assert shares(1) == [SEED_0]
    assert shares(4) == [[7, 3, 9], [8, 4, 6], [1, 2, 7], [5, 0, 8]]
    assert shares(3, epoch=1) == [[6, 7, 0, 2], [8, 5, 4, 6], [9, 3, 1, 8]]
    assert shares(2, epoch=2, seed=5) == [[8, 1, 7, 9, 2], [3, 4, 0, 6, 5]]
    assert shares(3, shuffle=False) == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]


def test_what_is_left_of_an_epoch() -> None:
    assert shares(2, processed=4) == [[3, 2, 9], [4, 0, 6]]
    assert shares(4, processed=4) == [[3, 9], [4, 6], [2, 3], [0, 4]]
    assert shares(3, shuffle=False, processed=7) == [[7], [8], [9]]


def test_fewer_left_than_ranks() -> None:
    assert shares(4, processed=8) == [[9], [6], [9], [6]]
    assert shares(4, processed=9) == [[6], [6], [6], [6]]
    assert shares(3, length=1) == [[0], [0], [0]]
    for nothing in (10, 12):
        assert shares(2, processed=nothing) == [[], []]
    assert shares(2, length=0) == [[], []]


def test_progress() -> None:
    def program(_: object) -> None:
        indices = ElasticIndices(10)
        assert (indices.epoch, indices.processed_num, indices.num_replicas) == (0, 0, 2)
        assert (indices.num_samples, indices.total_size) == (5, 10)
        assert indices.remaining_indices == SEED_0
        share = list(indices)
        indices.record_batch(0, 2)
        indices.record_batch(1, 1)
        assert indices.state_dict() == {"epoch": 0, "processed_num": 6}
        assert list(indices) == share  # until the indices are distributed again
        indices.reset()
        assert indices.remaining_indices == [2, 0, 9, 6]
        assert list(indices) == [[2, 9], [0, 6]][indices.rank]
        indices.set_epoch(1)
        assert indices.state_dict() == {"epoch": 1, "processed_num": 0}
        assert list(indices) == [[6, 9, 5, 0, 1], [8, 7, 3, 4, 2]][indices.rank]

    job(2, program)


def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        ElasticIndices(3)
