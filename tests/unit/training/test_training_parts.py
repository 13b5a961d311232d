"""Learning rates, top-k counts and checkpoints in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError


@pytest.fixture
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_rates_of_published_runs() -> None:
    goyal = hvd.Schedule(3.2, 90, "step", 5, 0.1, milestones=(30, 60, 80))
    assert [round(goyal(epoch), 6) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80, 90)] == [
        0.1, 1.65, 3.2, 3.2, 0.32, 0.032, 0.0032, 0.0032
    ]  # fmt: skip
    cosine = hvd.Schedule(2.0, 90, warmup_epochs=10)
    assert (cosine(0), cosine(10)) == (0.0, 2.0)
    assert (cosine(50), cosine(90), cosine(91)) == (pytest.approx(1.0), pytest.approx(0), pytest.approx(0))
    mlperf = hvd.Schedule(10.0, 42, "polynomial", 2)
    assert (mlperf(22), mlperf(42)) == (pytest.approx(2.5), 0.0)
    assert hvd.Schedule(1.0, 3, "constant", 0)(2) == 1.0
    with pytest.raises(ArgumentError, match="cosine"):
        hvd.Schedule(1.0, 3, "cosinus", 0)
    with pytest.raises(ArgumentError, match="warmup_epochs=5"):
        hvd.Schedule(1.0, 3)


def test_top_k_is_strict(job: None) -> None:
    metric = hvd.TopK((1, 2))
    metric.add([[0.1, 0.9, 0.5], [0.9, 0.1, 0.5], [0.5, 0.5, 0.5]], [1, 2, 0])
    metric.add(np.array([[np.nan, 1.0, 2.0]], np.float32), np.array([0]))
    assert metric.result() == {"count": 4, "top1": 0.25, "top2": 0.5}
    with pytest.raises(ArgumentError, match=r"\(2, 3\) and \(3,\)"):
        metric.add(np.zeros((2, 3)), np.zeros(3, int))


def test_checkpoints_are_kept_by_number(job: None, tmp_path: Path) -> None:
    saved = hvd.Checkpoints(tmp_path / "new", keep=2, suffix=".bin")
    assert saved.read() is None
    for number in (5, 10, 100):
        saved.save(number, lambda path, number=number: path.write_bytes(b"x" * number))
    assert saved.read() == (100, b"x" * 100)
    assert saved.numbers() == [10, 100]
    assert saved.read(10) == (10, b"x" * 10)
    assert sorted(os.listdir(saved.directory)) == ["checkpoint-00000010.bin", "checkpoint-00000100.bin"]

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    saved.save(200, full)
    with pytest.raises(hvd.CheckpointError, match=r"rank 0 on .*No space left on device"):
        saved.save(300, lambda path: path.write_bytes(b""))
    assert saved.read() == (100, b"x" * 100)
    assert len(os.listdir(saved.directory)) == 2
    with pytest.raises(hvd.CheckpointError, match="No such file"):
        saved.read(7)
    saved.close()


KILLED = """
import sys, time
import ringdance.numpy as hvd
hvd.init()
saved = hvd.Checkpoints(sys.argv[1])
saved.save(1, lambda path: path.write_text("first"))
def endless(path):
    with open(path, "w") as file:
        while True:
            file.write("second" * 1000)
            file.flush()
            time.sleep(0.01)
saved.save(2, endless)
time.sleep(100)
"""


def test_a_killed_writer_leaves_the_checkpoint_before(job: None, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".checkpoint-00000002.partial")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob(".*.partial"))
    saved = hvd.Checkpoints(tmp_path)
    assert saved.read() == (1, b"first")
    assert os.listdir(tmp_path) == ["checkpoint-00000001"]
    saved.close()
