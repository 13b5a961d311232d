"""`ringdance data prepare` killed at any time: the same command resumes, and the bytes are the same."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from criteo_lines import criteo_lines

from ringdance.data import planted

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("simplejpeg")

SHARDS = 40
IMAGES = 1200


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Create images of two classes: few different contents, many names."""
    root = tmp_path_factory.mktemp("src")
    first = []
    for number in range(8):
        pixels = np.random.RandomState(number).randint(0, 256, (256, 256, 3), np.uint8)
        data = io.BytesIO()
        PIL.fromarray(pixels).save(data, "JPEG", quality=90 + number)
        first.append(root / f"image.{number}")
        first[-1].write_bytes(data.getvalue())
    for number in range(IMAGES):
        path = root / f"src/n{number % 2}/{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(first[number % 8], path)
    return root / "src"


def command(source: Path, destination: Path, processes: int) -> list[str]:
    return [
        sys.executable, "-m", "ringdance", "data", "prepare", "imagenet", str(source), str(destination),
        "--shards", str(SHARDS), "-np", str(processes),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> dict[str, bytes]:
    """Return the files of an undisturbed run."""
    destination = tmp_path_factory.mktemp("whole")
    subprocess.run(command(source, destination, 1), check=True, timeout=60)
    return files(destination)


def files(destination: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in destination.iterdir() if path.is_file()}


def workers_of(family: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that write, without the one that tracks their shared memory."""
    return [process for process in family if any("spawn_main" in word for word in process.cmdline())]


@pytest.mark.parametrize("victim", ["parent", "worker", pytest.param("alone", marks=pytest.mark.slow)])
def test_resumed_after_kill_9(source, whole, tmp_path, victim):
    destination = tmp_path / "dst"
    processes = 1 if victim == "alone" else 2
    with open(tmp_path / "first", "wb") as output:
        job = subprocess.Popen(command(source, destination, processes), stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while len(done := list(destination.glob("train-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    workers = workers_of(family)
    assert len(workers) == (0 if victim == "alone" else 2)
    (workers[1] if victim == "worker" else family[0]).send_signal(signal.SIGKILL)
    code = job.wait(60)
    psutil.wait_procs(family, timeout=30)
    assert not [item for item in family if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]
    if victim == "worker":
        assert code == 2
        assert b"Stopped. The same command resumes" in (told := (tmp_path / "first").read_bytes())
        assert b"a process was killed" in told
    done = list(destination.glob("train-*"))
    assert 3 <= len(done) < SHARDS
    assert not (destination / "train.json").exists()
    kept = {path.name: path.stat().st_ino for path in done}

    resume = command(source, destination, 3 - processes)
    again = subprocess.run(resume, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "Resuming: " in again.stderr
    result = files(destination)
    assert result == whole
    written = [name for name, number in kept.items() if (destination / name).stat().st_ino != number]
    assert len(written) <= processes  # renamed, but not yet recorded as complete
    assert sorted(path.name for path in (destination / ".prepare").iterdir()) == ["lock", "train.json"]


def test_a_second_run_at_the_same_time_is_refused(source, tmp_path):
    with open(tmp_path / "first", "wb") as output:
        job = subprocess.Popen(command(source, tmp_path / "dst", 1), stdout=output, stderr=output)
    while not list(tmp_path.glob("dst/train-*")):
        time.sleep(0.002)
    second = subprocess.run(command(source, tmp_path / "dst", 1), capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert "another `ringdance data prepare` is writing to" in second.stderr
    assert job.wait(60) == 0


@pytest.mark.slow
def test_click_logs_resumed_after_kill_9_in_both_passes(tmp_path):
    pytest.importorskip("pyarrow")
    source, whole, destination = tmp_path / "train.txt", tmp_path / "whole", tmp_path / "dst"
    source.write_bytes(b"".join(criteo_lines(part) for part in planted(80_000)))
    start = [sys.executable, "-m", "ringdance", "data", "prepare", "criteo", str(source)]
    options = ["--chunk", "1", "--shards", "48", "--format", "tfrecord", "-np"]
    subprocess.run([*start, str(whole), *options, "1"], check=True, timeout=60)
    for pattern, victim in ((".prepare/unit.*", "parent"), ("train-*", "worker")):
        with open(tmp_path / "output", "wb") as output:
            job = subprocess.Popen([*start, str(destination), *options, "2"], stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while len(list(destination.glob(pattern))) < 3 and time.monotonic() < deadline:
            time.sleep(0.002)
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        workers = workers_of(family)
        assert len(workers) == 2
        (workers[1] if victim == "worker" else family[0]).send_signal(signal.SIGKILL)
        assert job.wait(60)
        psutil.wait_procs(family, timeout=30)
        done = list(destination.glob(pattern))
        assert len(done) < 48
        assert not (destination / "train.json").exists()
        times = {path: path.stat().st_mtime_ns for path in done}
    subprocess.run([*start, str(destination), *options, "1"], check=True, timeout=60)
    again = [path for path in times if path.stat().st_mtime_ns != times[path]]
    assert len(again) <= 2  # complete, but not yet recorded
    assert files(destination) == files(whole)
    left = ["criteo.json", "lock"]  # criteo.json lists what --overwrite may remove
    assert sorted(path.name for path in (destination / ".prepare").iterdir()) == left
