"""Process sets: created and removed at any time, overlapping, each with its own agreement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from by_numpy import all_values, reduced, rows_of, same, values

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError, MismatchError, ProcessSetRemovedError
from ringdance.training.process_sets import ProcessSet

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)


@contextmanager
def sets_of(*members: list[int]) -> Iterator[list[ProcessSet]]:
    made = [hvd.add_process_set(ranks) for ranks in members]
    yield made
    for process_set in made:
        assert hvd.remove_process_set(process_set)


@several
def test_every_verb_on_a_set(way: str) -> None:
    """Even and odd ranks use their sets at the same time, each with its own number of calls."""
    evens, odds = list(range(0, SIZE, 2)), list(range(1, SIZE, 2))
    with sets_of(evens, odds) as (first, second):
        mine, ranks = (first, evens) if RANK in evens else (second, odds)
        place, n = ranks.index(RANK), len(ranks)
        assert mine.size() == n
        assert mine.rank() == place
        for step in range(3 + RANK % 2):
            inputs = all_values(ranks, "float32", (50, 4), step)
            same(hvd.allreduce(inputs[place], process_set=mine), reduced(inputs, "average"))
            same(
                hvd.allgather(inputs[place][:place], process_set=mine),
                np.concatenate([part[:i] for i, part in enumerate(inputs)]),
            )
            same(hvd.broadcast(inputs[place], ranks[-1], process_set=mine), inputs[-1])
            same(
                hvd.reducescatter(inputs[place], process_set=mine, op=hvd.Sum),
                reduced(inputs, "sum")[rows_of(place, 50, n)],
            )
            got, received = hvd.alltoall(inputs[place], [3] * n, process_set=mine)
            same(got, np.concatenate([part[3 * place : 3 * place + 3] for part in inputs]))
            assert received.tolist() == [3] * n
            hvd.barrier(process_set=mine)


@several
def test_overlapping_sets_at_once(way: str) -> None:
    """Pairs around a ring and all ranks have work in flight, and each rank waits in a different order."""
    rings = [sorted({rank, (rank + 1) % SIZE}) for rank in range(SIZE if SIZE > 2 else 0)]
    with sets_of(*rings) as made:
        handles = []
        for step in range(6):
            for value, ranks in [*zip(made, rings, strict=True), (hvd.global_process_set, list(range(SIZE)))]:
                if RANK in ranks:
                    inputs = all_values(ranks, "int64", (30,), step)
                    handle = hvd.allreduce(
                        values(RANK, "int64", (30,), step),
                        name=f"same name {step}",
                        op=hvd.Sum,
                        process_set=value,
                    wait=False)
                    handles.append((handle, reduced(inputs, "sum")))
        for i in np.random.default_rng(RANK).permutation(len(handles)):
            same(hvd.synchronize(handles[i][0]), handles[i][1])


@several
def test_outsiders_go_on(way: str) -> None:
    with sets_of([0]) as (alone,):
        if RANK == 0:
            same(hvd.allreduce(np.full(3, 5.0), process_set=alone), np.full(3, 5.0))
            assert hvd.allgather(np.ones(2), process_set=alone).size == 2
            hvd.barrier(process_set=alone)
        else:
            with pytest.raises(ArgumentError, match=f"Rank {RANK} .*not a member"):
                hvd.allreduce(np.ones(3), process_set=alone)
            with pytest.raises(ArgumentError, match="not a member"):
                hvd.barrier(process_set=alone)
        same(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(SIZE)))


@several
def test_arguments_that_do_not_go(way: str) -> None:
    with pytest.raises(ArgumentError, match="already exists"):
        hvd.add_process_set(list(range(SIZE)))
    with sets_of([0]):
        with pytest.raises(ArgumentError, match="already exists"):
            hvd.add_process_set([0])
    with pytest.raises(ArgumentError, match=f"has the ranks 0 to {SIZE - 1}"):
        hvd.add_process_set([0, SIZE])
    with pytest.raises(ArgumentError, match="no duplicates"):
        hvd.add_process_set([0, 0])
    with pytest.raises(ArgumentError):
        hvd.add_process_set([])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(ProcessSet([0]))
    with pytest.raises(ArgumentError, match="is not registered"):
        hvd.allreduce(np.ones(2), process_set=ProcessSet([0]))


@several
@pytest.mark.parametrize("wrong", [[0, SIZE], [SIZE - 1] * 2, [], [0.5], list(range(SIZE))])
def test_arguments_that_do_not_go_on_one_rank(way: str, wrong: list[int]) -> None:
    """Only the last rank's call is wrong, and the others receive an error instead of waiting."""
    if RANK == SIZE - 1:
        with pytest.raises(ArgumentError):
            hvd.add_process_set(wrong)
    else:
        with pytest.raises(MismatchError, match=f"the call on rank {SIZE - 1} .* process set"):
            hvd.add_process_set([0])
    with sets_of([1]) as (made,):
        assert made.process_set_id == 1


@several
def test_different_members_on_ranks(way: str) -> None:
    with pytest.raises(MismatchError, match=r"\[0\] on rank 0 .*\[1\] on rank"):
        hvd.add_process_set([0] if RANK == 0 else [1])
    with sets_of([1]):
        hvd.barrier()


@several
def test_pending_work_of_a_removed_set_fails(way: str) -> None:
    """Removing a set fails work that only rank 0 submitted, and frees the set's id."""
    ranks = [0, SIZE - 1]
    made = hvd.add_process_set(ranks) if SIZE > 2 else hvd.global_process_set
    if SIZE == 2:
        return
    handle = hvd.allreduce(np.ones(4), name="never", process_set=made, wait=False) if RANK == 0 else -1
    number = made.process_set_id
    assert hvd.remove_process_set(made)
    if RANK == 0:
        with pytest.raises(ProcessSetRemovedError, match=f"Process set {number} was removed"):
            hvd.synchronize(handle)
    with pytest.raises(ArgumentError, match="not registered"):
        hvd.allreduce(np.ones(2), process_set=made)
    with sets_of(ranks) as (again,):
        assert again.process_set_id == number
        if RANK in ranks:
            same(hvd.allreduce(np.ones(4), name="never", op=hvd.Sum, process_set=again), np.full(4, 2.0))


@several
def test_many_sets_made_and_removed_under_load(way: str) -> None:
    """Sets can be created and removed while the global set's work is in flight."""
    for step in range(5):
        load = np.full(20_000, 1.0)
        handles = [hvd.allreduce(load, name=f"load {i}", op=hvd.Sum, wait=False) for i in range(5)]
        with sets_of([step % SIZE], *([[0, 1]] if SIZE > 2 else [])) as made:
            for process_set in made:
                if process_set.included():
                    hvd.allreduce(np.ones(10), process_set=process_set)
            for handle in handles:
                same(hvd.synchronize(handle), np.full(20_000, float(SIZE)))


@several
def test_static_sets_from_init(way: str) -> None:
    hvd.shutdown()
    process_set = ProcessSet(range(1, SIZE))
    other = ProcessSet([0])
    hvd.init(process_sets=[process_set, other])
    assert (process_set.process_set_id, other.process_set_id) == (1, 2)
    if process_set.included():
        same(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=process_set), np.full(2, SIZE - 1.0))
    hvd.barrier()


def test_init_and_shutdown_again_and_again(way: str) -> None:
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
        same(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(SIZE)))
