"""Contract, torch: start and end, barriers, join, the timeline's two calls."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_inputs import DIMS, RANK, REDUCED, SIZE, draw, gpu, same, several

import horovod.torch as hvd

pytestmark = pytest.mark.limit(90)


def test_init_after_shutdown() -> None:
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def test_is_initialized() -> None:
    assert hvd.is_initialized()
    hvd.shutdown()
    try:
        assert not hvd.is_initialized()
        for query in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
            with pytest.raises(ValueError, match="init"):
                query()
    finally:
        hvd.init()
    assert hvd.is_initialized()


def launched(*names: str) -> int:
    """Return the value that the launcher put into the environment, or -1."""
    texts = [os.environ[name] for name in names if name in os.environ]
    return int(texts[0]) if texts else -1


@several
def test_rank_is_the_launchers() -> None:
    assert hvd.rank() == launched("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    assert hvd.local_rank() == hvd.rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


@several
def test_size_is_the_launchers() -> None:
    assert hvd.size() == launched("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    assert hvd.local_size() == hvd.size()


def test_a_gpu_is_there_if_required() -> None:
    assert gpu().type == "cuda"


# Barriers. Files visible to all ranks record which rank arrived first.


@pytest.fixture
def notes() -> Iterator[Path]:
    directory = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))
    yield directory
    hvd.barrier()
    if RANK == 0:
        shutil.rmtree(directory)


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


@several
def test_barrier_of_all(notes: Path) -> None:
    for last in range(SIZE):
        if last == RANK:
            time.sleep(0.3)
        (notes / f"{last}.{RANK}").touch()
        hvd.barrier()
        assert all((notes / f"{last}.{rank}").exists() for rank in range(SIZE))


@several
def test_barrier_of_a_process_set(notes: Path, halves: Any) -> None:
    """Rank 0 stays away from its set's barrier until the other set has passed its own."""
    mine, _ = halves
    if RANK == 0:
        wait_until(lambda: (notes / "odd set passed").exists())
        (notes / "rank 0 comes").touch()
    hvd.barrier(process_set=mine)
    if 0 in mine.ranks:
        assert (notes / "rank 0 comes").exists()
    elif RANK == 1:
        assert not (notes / "rank 0 comes").exists()
        (notes / "odd set passed").touch()


def test_barrier_amid_collectives() -> None:
    first = [hvd.allreduce_async(draw(dtype, 2), op=hvd.Sum) for dtype in REDUCED]
    rows = hvd.allgather_async(torch.full((RANK + 1,), RANK))
    hvd.barrier()
    second = [hvd.allreduce_async(draw(dtype, 3), op=hvd.Sum) for dtype in REDUCED]
    hvd.barrier()
    for dtype, actual, other in zip(REDUCED, first, second, strict=True):
        same(hvd.synchronize(actual), draw(dtype, 2) * SIZE)
        same(hvd.synchronize(other), draw(dtype, 3) * SIZE)
    assert hvd.synchronize(rows).tolist() == [rank for rank in range(SIZE) for _ in range(rank + 1)]


# Join.


def place_after(first: int) -> int:
    """Return this rank's position in the join order if `first` joins right away."""
    return (RANK - first) % SIZE


@several
def test_join_with_each_rank_first(device: Any) -> None:
    """Other ranks continue, and the mean is still over all. The second time, the names are known."""
    for first in [*range(SIZE), *range(SIZE)]:
        for step in range(place_after(first)):
            tensors = [draw(dtype, dims, device, most=90) * SIZE for dtype in REDUCED for dims in DIMS]
            handles = [hvd.allreduce_async(value, name=f"joined.{k}") for k, value in enumerate(tensors)]
            for tensor, handle in zip(tensors, handles, strict=True):
                same(hvd.synchronize(handle), (tensor // SIZE) * (SIZE - 1 - step))
        assert hvd.join() == (first - 1) % SIZE


@several
@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall", "reducescatter"])
def test_not_under_join(kind: str) -> None:
    call = {
        "allgather": lambda: hvd.allgather(torch.ones(SIZE), name="under join"),
        "broadcast": lambda: hvd.broadcast(torch.ones(SIZE), SIZE - 1, name="under join"),
        "alltoall": lambda: hvd.alltoall(torch.ones(SIZE), name="under join"),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(SIZE), name="under join"),
    }[kind]
    if RANK > 0:
        with pytest.raises(hvd.HorovodInternalError, match="join"):
            call()
    hvd.join()
    call()


def test_timeline_starts_and_stops(notes: Path) -> None:
    for step in range(5):
        hvd.start_timeline(str(notes / f"{step}.json"), mark_cycles=step % 2 == 0)
        hvd.allreduce(torch.ones(3), name="seen")
        hvd.stop_timeline()
        if hvd.rank() == 0:
            text = (notes / f"{step}.json").read_text()
            names = {load["name"] for load in json.loads(text)}
            assert {"process_name", "NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names
            assert "allreduce.seen" in text
            assert "start_time_since_epoch_in_micros" in text
            assert ("CYCLE_START" in text) == (step % 2 == 0)
