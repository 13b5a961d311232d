"""Two managers save to one directory and are killed: the newest checkpoint is read, and is complete."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import start, wait_until

import ringdance.numpy as hvd

# Saves are counted. The count is stored in the model and throughout the table, and recorded before and after
# the save. Checkpoint numbers may go back and recur.
PROGRAM = """
import os, random, sys
import ringdance.numpy as hvd

hvd.init()
directory, notes, count, sharded = sys.argv[1:]
count, chance = int(count), random.Random(int(count))
table = hvd.EmbeddingTable(3000, 8, sharded=bool(int(sharded)))
managers = {name: hvd.Checkpoints(directory, keep, name) for name, keep in (("model", 2), ("model-best", 1))}
file = os.open(notes, os.O_WRONLY | os.O_APPEND)

def note(*words):
    if hvd.rank() == 0:
        os.write(file, (" ".join(map(str, words)) + "\\n").encode())

for saved in managers.values():
    if (found := saved.read()) and found[1].startswith(b"table"):
        assert saved.read(table=table) == found and (table.values == int(found[1].split()[1])).all()
note("ready", os.getpid())
while True:
    begun = []
    for name, saved in managers.items():
        count += 1
        number = chance.choice([count, count, 1, 2, 10])
        table.values[:] = count
        note("begin", name, count, number)
        own = chance.choice([table, table, None])
        text = f"{'table' if own else 'alone'} {count}" + " " * chance.choice([1, 1_000_000])
        saved.save(number, lambda path, text=text: path.write_text(text), own)
        begun.append((saved, "done", name, count, number))
    for saved, *words in begun:
        saved.wait()
        note(*words)
"""


@pytest.fixture
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def notes_of(path: Path, what: str, name: str) -> list[tuple[int, int]]:
    """Return the recorded counts and numbers of a manager's saves."""
    words = [line.split() for line in path.read_text().splitlines()]
    return [(int(line[2]), int(line[3])) for line in words if line[:2] == [what, name]]


def saves(notes: Path, ready: int) -> bool:
    """Return True once the program has started again and something has been saved."""
    text = notes.read_text()
    return text.count("ready") > ready and "done" in text


def kill_while_saving(directory: Path, ranks: int, count: int, notes: Path) -> None:
    """Start the program and kill rank 0 at a random time, then the rest."""
    ready = notes.read_text().count("ready")
    words = [sys.executable, "-c", PROGRAM, str(directory), str(notes), str(count), str(ranks - 1)]
    with open(directory.parent / "output.txt", "wb") as output:
        if ranks == 1:
            process = subprocess.Popen(words, stderr=output)
        else:
            job = start(directory.parent, "-np", str(ranks), *words, stdout=output, stderr=output)
            process = job.process  # type: ignore[assignment]
        try:
            begun = wait_until(lambda: saves(notes, ready) or process.poll() is not None, 60)
            text = (directory.parent / "output.txt").read_text()
            assert begun is not None, text
            assert process.poll() is None, text
            time.sleep(random.Random(count).uniform(0, 0.15))
            rank = int([line for line in notes.read_text().splitlines() if "ready" in line][-1].split()[1])
            os.kill(rank, signal.SIGKILL)
        finally:
            if ranks == 1:
                process.kill()
                process.wait()
            else:
                job.end()


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (1, 4), (2, 1),
        pytest.param(1, 60, marks=[pytest.mark.slow, pytest.mark.limit(600)]),
        pytest.param(2, 40, marks=[pytest.mark.slow, pytest.mark.limit(1200)]),
    ],
)  # fmt: skip
def test_the_newest_completed_checkpoint_is_read(
    job: None, ranks: int, kills: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, notes = tmp_path / "saved", tmp_path / "notes"
    directory.mkdir()
    notes.touch()
    table = hvd.EmbeddingTable(3000, 8)
    count = completed = 0
    for _ in range(kills):
        kill_while_saving(directory, ranks, count, notes)
        for name, keep in (("model", 2), ("model-best", 1)):
            begun, done = notes_of(notes, "begin", name), notes_of(notes, "done", name)
            saved = hvd.Checkpoints(directory, keep, name)
            newest = saved.read()
            if newest is None:
                assert not done
                continue
            assert int(newest[1].split()[1]) >= max(done, default=(0, 0))[0]
            numbers = saved.numbers()
            assert numbers[-1] == newest[0]
            for number in numbers:
                content = saved.read(number)
                assert content is not None
                what, written = content[1].split()
                assert (int(written), number) in begun
                if what == b"table":
                    saved.read(number, table)
                    assert np.unique(table.values).tolist() == [int(written)]
                else:
                    with pytest.raises(hvd.CheckpointError, match="has no table"):
                        saved.read(number, table)
            saved.close()
            count, completed = max(count, begun[-1][0]), completed + len(done)
    assert completed
    assert not caplog.records
    left = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
    assert len(left) <= 2 * (2 + 1) + 2, left
