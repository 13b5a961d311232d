"""pipe_loader with real FIFOs and writer processes: equal to the rows, two on one FIFO, broken rows."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import criteo_lines

import ringdance.numpy as hvd
from ringdance.data import planted
from ringdance.data.tables import Rows
from ringdance.data.tables.examples import encode
from ringdance.errors import ArgumentError
from ringdance.training.objects import allgather_object, broadcast_object

pytest.importorskip("pyarrow")
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
COPY = "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), open(sys.argv[2], 'wb'))"
SMALL = {"table_size": 5000, "timeout": 5.0}


@pytest.fixture
def directory() -> Path:
    """The same directory on all ranks."""
    return Path(broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))


def write(pipe: Path, data: bytes) -> subprocess.Popen[bytes]:
    """Make a pipe, and start a process that writes into it."""
    os.mkfifo(pipe)
    source = pipe.with_name(f"{pipe.name}.data")
    source.write_bytes(data)
    return subprocess.Popen([sys.executable, "-c", COPY, str(source), str(pipe)])


def rows_of(number: int, count: int) -> Rows:
    (part,) = planted(count, seed=number)
    return part.rows(5000)


@pytest.mark.ranks(1, 2, 3)
def test_each_rank_has_its_pipe_and_all_end_together(directory):
    writers, whole = [], []
    for epoch in range(2):
        counts = [300 + 100 * rank if rank != 1 else 0 for rank in range(SIZE)]  # rank 1 gets nothing
        whole.append([rows_of(10 * epoch + rank, n) if n else None for rank, n in enumerate(counts)])
        mine = whole[-1][RANK]
        writers.append(write(directory / f"train_{RANK}_{epoch}", encode(mine) if mine else b""))
    loader = hvd.pipe_loader("train", 64, directory=directory, **SMALL)
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches, total = list(loader), 0
        assert len({*allgather_object(len(batches))}) == 1
        for batch in batches:
            n = len(batch.labels) if batch.weight else 0
            everyone = allgather_object((n, batch.count))
            assert sum(one[0] for one in everyone) == batch.count == everyone[0][1]
            assert batch.weight == n * SIZE / batch.count
            total += batch.count
            assert batch.position == total
        parts = [batch for batch in batches if batch.weight]
        for name in Rows._fields if whole[epoch][RANK] else ():
            got = np.concatenate([getattr(batch, name) for batch in parts])
            assert got.tobytes() == getattr(whole[epoch][RANK], name).tobytes()
        assert total == sum(len(one.labels) for one in whole[epoch] if one)
    assert [writer.wait(10) for writer in writers] == [0, 0]


@pytest.mark.ranks(2)
def test_two_workers_on_one_pipe(directory):
    writer = write(directory / "train_0", encode(rows_of(0, 50))) if RANK == 0 else None
    hvd.barrier()
    loader = hvd.pipe_loader("train", 16, directory=directory, **SMALL)
    with pytest.raises(ArgumentError) as caught:
        next(iter(loader))
    pids = allgather_object(os.getpid())
    assert f"rank 0 (process {pids[0]}) and rank 1 (process {pids[1]})" in str(caught.value)
    assert "train_0, train_1" in str(caught.value)
    hvd.allreduce(np.ones(1))  # the ranks go on
    if writer:
        writer.kill()
        writer.wait()


@pytest.mark.ranks(2)
def test_a_pipe_that_another_process_reads(directory):
    os.mkfifo(directory / f"train_{RANK}_0")
    code = "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)"
    code += "; fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    other = None
    if RANK == 1:
        words = [sys.executable, "-c", code, str(directory / "train_1_0")]
        other = subprocess.Popen(words, stdout=subprocess.PIPE)
        other.stdout.readline()
    pid = allgather_object(other.pid if other else None)[1]
    with pytest.raises(ArgumentError, match=f"rank 1 of host .*train_1_0 is read by process {pid} already"):
        next(iter(hvd.pipe_loader("train", 16, directory=directory, **SMALL)))
    if other:
        other.kill()
        other.wait()


@pytest.mark.ranks(2)
def test_a_broken_row_and_a_missing_pipe_are_told_on_all_ranks(directory):
    (part,) = planted(100)
    lines = criteo_lines(part).splitlines(keepends=True)
    lines[70] = b"0,broken\n"
    writer = write(directory / f"train_{RANK}_0", b"".join(lines if RANK == 1 else lines[:50]))
    loader = hvd.pipe_loader("train", 16, directory=directory, **(SMALL | {"timeout": 0.5}))
    with pytest.raises(ArgumentError, match=r"rank 1 of host .*train_1_0, line 71 .*: "):
        list(loader)
    with pytest.raises(ArgumentError, match=r"rank 0 of host .*train_0_1 is not there after 0.5 s"):
        list(loader)
    writer.wait(10)
    with pytest.raises(ArgumentError, match="position=64"):
        loader.set_epoch(0, 64)
