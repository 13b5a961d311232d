"""Starting, stopping, and process sets, used the way scripts for Horovod use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod")

import torch

import horovod.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(autouse=True)
def _usual_job() -> Iterator[None]:
    """Start each test outside a job, and restore the usual job afterwards."""
    hvd.shutdown()
    yield
    hvd.shutdown()
    hvd.init()


def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def total(value: float, **options: Any) -> float:
    return float(hvd.allreduce(torch.tensor([value]), op=hvd.Sum, **options).item())


def registered() -> dict[int, list[int]]:
    ids: dict[int, list[int]] = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    return ids


def test_again_and_again() -> None:
    for _ in range(3):
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
            hvd.rank()
        hvd.init()
        assert hvd.init() is None
        assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (RANK, SIZE, True)
        assert total(1.0) == SIZE
        hvd.shutdown()
        hvd.shutdown()


def test_mpi_beside_it() -> None:
    """A script asserts that threads are supported and then uses mpi4py, as Horovod's documentation shows."""
    hvd.init()
    assert hvd.mpi_threads_supported() is True
    assert hvd.mpi_enabled() is hvd.mpi_built() is True
    if SIZE > 1:
        assert hvd.size() == world().Get_size()
        assert hvd.rank() == world().Get_rank()
        assert world().allreduce(1) == SIZE


@several
def test_ranks_as_comm() -> None:
    """Two jobs run at once, each with the ranks in its list, in list order."""
    mine = [rank for rank in range(SIZE) if (rank == 0) is (RANK == 0)][::-1]
    hvd.init(comm=mine)
    assert (hvd.rank(), hvd.size()) == (mine.index(RANK), len(mine))
    assert total(float(RANK)) == sum(mine)
    hvd.shutdown()
    hvd.init([])
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)


@several
def test_not_in_the_list() -> None:
    if RANK == 0:
        hvd.init(comm=[0])
        assert hvd.size() == 1
    else:
        with pytest.raises(ValueError, match=f"rank {RANK} of {SIZE}, which is not in the list"):
            hvd.init(comm=[0])
        assert not hvd.is_initialized()
    for wrong in ([RANK, SIZE], [RANK, RANK], "ranks", 5):
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"init\(comm"):
            hvd.init(comm=wrong)


@several
def test_a_communicator_as_comm() -> None:
    hvd.init()  # starts MPI
    hvd.shutdown()
    half = world().Split(RANK % 2, -RANK)
    hvd.init(comm=half)
    assert (hvd.rank(), hvd.size()) == (half.Get_rank(), half.Get_size())
    assert total(float(RANK)) == sum(range(RANK % 2, SIZE, 2))
    hvd.shutdown()
    half.Free()
    hvd.init(comm=world())
    assert hvd.rank() == RANK


@several
def test_static_sets_and_better_ones_after_a_refusal() -> None:
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(SIZE - 1, 0, -1))
    for wrong in ([first, hvd.ProcessSet([0])], [first, hvd.ProcessSet(range(SIZE))]):
        with pytest.raises(ValueError, match=r"must differ|already exists"):
            hvd.init(process_sets=wrong)
        assert first.process_set_id is None
        assert hvd.is_initialized()
    hvd.init(process_sets=[first, rest])
    assert registered() == {0: list(range(SIZE)), 1: [0], 2: list(range(1, SIZE))}
    assert (first.process_set_id, rest.process_set_id, rest.ranks) == (1, 2, list(range(1, SIZE)))
    assert hvd.global_process_set.ranks == list(range(SIZE))
    mine = first if RANK == 0 else rest
    assert mine.included()
    assert (mine.rank(), mine.size()) == ((0, 1) if RANK == 0 else (RANK - 1, SIZE - 1))
    assert total(1.0, process_set=mine) == mine.size()
    other = rest if RANK == 0 else first
    assert not other.included()
    with pytest.raises(ValueError, match="is not a member of process set"):
        other.rank()
    with pytest.raises(ValueError, match="not a member"):
        hvd.allreduce_async(torch.ones(1), process_set=other)
    # The job is already running, so init() matches process sets to existing ones by their ranks.
    again = hvd.ProcessSet([0])
    hvd.init(process_sets=[again])
    assert again.process_set_id == 1
    assert again != first
    with pytest.raises(KeyError):
        hvd.init(process_sets=[hvd.ProcessSet([0, 7])])


@several
@pytest.mark.parametrize("kind", ["members", "number", "none", "range"])
def test_sets_that_differ_between_ranks(kind: str) -> None:
    own: Any = {
        "members": [hvd.ProcessSet([RANK])],
        "number": [hvd.ProcessSet([0]), hvd.ProcessSet([1])][: RANK + 1],
        "none": [hvd.ProcessSet([0])] if RANK else None,
        "range": [hvd.ProcessSet([SIZE if RANK else 0])],
    }[kind]
    message = "has the ranks 0 to" if kind == "range" else "differs between ranks"
    with pytest.raises(ValueError, match=message):
        hvd.init(process_sets=own)
    hvd.init(process_sets=[hvd.ProcessSet([1])])
    assert registered() == {0: list(range(SIZE)), 1: [1]}


@several
def test_sets_made_from_communicators() -> None:
    """Each rank passes its own half. Ranks refer to the job, whatever the order of the communicator."""
    hvd.init()
    hvd.shutdown()
    turned = world().Split(0, -RANK)
    half = turned.Split(RANK % 2, -RANK)
    mine = hvd.ProcessSet(half)
    assert (mine.mpi_comm, mine.ranks) == (half, None)
    for wrong in (
        [mine, hvd.ProcessSet(half.Dup())],
        [hvd.ProcessSet(turned.Dup())],
        [mine, hvd.ProcessSet([turned.Get_rank()]), hvd.ProcessSet([turned.Get_rank()])],
    ):
        with pytest.raises(ValueError, match=r"must differ|already exists|differs between ranks"):
            hvd.init(comm=turned, process_sets=wrong)
    hvd.init(comm=turned, process_sets=[mine])
    assert hvd.rank() == SIZE - 1 - RANK
    expected = [SIZE - 1 - rank for rank in range(SIZE) if rank % 2 == RANK % 2][::-1]
    assert mine.ranks == expected
    assert mine.size() == len(expected)
    assert total(float(RANK), process_set=mine) == sum(range(RANK % 2, SIZE, 2))
    with pytest.raises(NotImplementedError, match="init"):
        hvd.add_process_set(hvd.ProcessSet(half))


@several
def test_dynamic_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init(process_sets="dynamic")
    added = hvd.add_process_set([0])
    assert isinstance(added, hvd.ProcessSet)
    assert registered() == {0: list(range(SIZE)), 1: [0]}
    own = hvd.ProcessSet([1])
    assert hvd.add_process_set(own) is own
    assert own.process_set_id == 2
    for equal in ([0], hvd.ProcessSet([1]), range(SIZE)):
        with pytest.raises(ValueError, match="already exists"):
            hvd.add_process_set(equal)
    assert hvd.remove_process_set(added) is True
    assert (added.process_set_id, added.size()) == (None, None)
    assert hvd.remove_process_set(added) is False
    # A freed number is assigned again.
    assert hvd.add_process_set(added) is added
    assert added.process_set_id == 1
    if RANK == 0:
        assert total(3.0, process_set=added) == 3.0
    with pytest.raises(ValueError, match=f"ranks 0 to {SIZE - 1}"):
        hvd.add_process_set([0, SIZE])
    assert total(1.0) == SIZE


def test_objects_outlive_a_shutdown_unregistered_in_effect() -> None:
    """Objects keep their numbers, as in Horovod, and init registers them again."""
    if SIZE == 1:
        pytest.skip("needs a second process set")
    kept = hvd.ProcessSet([0])
    hvd.init(process_sets=[kept])
    hvd.shutdown()
    assert kept.process_set_id == 1
    hvd.init(process_sets=[hvd.ProcessSet([1]), kept])
    assert kept.process_set_id == 2
    assert registered()[2] == [0]


def test_handles_of_a_former_job_are_forgotten() -> None:
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(2), name="done")
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="later"))
    hvd.shutdown()
    hvd.init()
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="not a handle"):
        hvd.poll(handle)
    hvd.barrier()


@several
def test_what_is_submitted_after_another_rank_s_shutdown_fails() -> None:
    hvd.init()
    hvd.barrier()
    if RANK == 0:
        hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError, match=r"hvd\.init\(\)"):
            hvd.allreduce(torch.ones(1))
    else:
        with pytest.raises(hvd.HorovodInternalError, match="shutdown"):
            hvd.allreduce(torch.ones(1), name="with rank 0")
        assert hvd.is_initialized()
