"""The cleanup after a failed job removes the job's shared memory, and leaves everything else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from ringdance.host.system import linux
from ringdance.host.system.cleanup import Cleanup

pytestmark = pytest.mark.skipif(not linux.LINUX, reason="needs Linux's /dev/shm")
SHARED = Path("/dev/shm")
MAPPING = """
import mmap, sys, time
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def others() -> Iterator[list[Path]]:
    """Create another program's files: written, closed and not unlinked, with names as libraries use them."""
    mark = uuid.uuid4().hex[:8]
    names = (f"psm_{mark}", f"sem.mp-{mark}", f"mpich_shar_tmp{mark}", f"torch_4194999_{mark}_0")
    files = [SHARED / name for name in names]
    for file in files:
        file.write_bytes(bytes(100))
    yield files
    for file in files:
        file.unlink(missing_ok=True)


def test_semaphores_and_memory_in_use_stay() -> None:
    """A semaphore stays mapped after its name is gone."""
    began = time.time()
    sem = multiprocessing.get_context("spawn").Lock()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert Cleanup("no such job", (), began).run(failed=True)
        assert Path("/dev/shm", "sem." + sem._semlock.name.lstrip("/")).exists()  # type: ignore[attr-defined]
        assert Path("/dev/shm", memory.name.lstrip("/")).exists()
    finally:
        memory.close()
        memory.unlink()


def test_what_another_program_has_closed_and_not_unlinked_stays(others: list[Path]) -> None:
    assert Cleanup("no such job", (), time.time() - 60).run(failed=True)
    assert all(file.exists() for file in others)


@pytest.mark.parametrize("substitute", [False, True])
def test_what_a_killed_process_alone_had_mapped_is_removed(
    tmp_path: Path, others: list[Path], substitute: bool
) -> None:
    """The cleanup saw the mapping while the job was running. A substitute process knows it from the notes."""
    job, began = uuid.uuid4().hex, time.time()
    segment = SHARED / f"psm_{job[:8]}"
    cleanup = Cleanup(job, [str(tmp_path)], began)
    cleanup.watch()
    child = subprocess.Popen(
        [sys.executable, "-c", MAPPING, str(segment)],
        env={**os.environ, linux.MARKER: job},
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout
        child.stdout.readline()
        later = SHARED / f"psm_{job[8:16]}"
        later.write_bytes(b"another program's, made while the job ran")
        others.append(later)
        until = time.monotonic() + 20.0
        while str(segment.stat().st_ino) not in notes(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    other = Cleanup(job, [str(tmp_path)], began) if substitute else cleanup
    assert other.run(failed=True)
    assert not segment.exists()
    assert all(file.exists() for file in others)


def test_another_process_that_now_has_the_number_of_a_killed_backup_stays() -> None:
    words = ["sh", "-c", "sleep 60 >&- & echo $!"]
    other = int(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    backup = subprocess.Popen(["sleep", "60"])
    try:
        for number in (other, backup.pid):
            cleanup = Cleanup("no such job", (), time.time())
            cleanup.backup = number
            cleanup.run()
        assert backup.wait(10) == -signal.SIGKILL
        assert Path(f"/proc/{other}/cmdline").read_bytes(), "the other process was killed"
    finally:
        os.kill(other, signal.SIGKILL)
        backup.kill()


def notes(directory: Path) -> list[str]:
    """Return the notes in a job's directory."""
    file = directory / "shared-memory"
    return file.read_text().split() if file.exists() else []
