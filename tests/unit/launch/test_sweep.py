"""What the sweep after a failed job leaves alone: what other programs of the same user use."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from ringdance.launch import linux
from ringdance.launch.sweep import Sweep

pytestmark = pytest.mark.skipif(not linux.LINUX, reason="/dev/shm is Linux's")


def test_semaphores_and_memory_in_use_stay() -> None:
    """A semaphore is mapped under a name that it no longer has."""
    began = time.time()
    lock = multiprocessing.get_context("spawn").Lock()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert Sweep("no such job", (), began).run(failed=True)
        assert Path("/dev/shm", "sem." + lock._semlock.name.lstrip("/")).exists()  # type: ignore[attr-defined]
        assert Path("/dev/shm", memory.name.lstrip("/")).exists()
    finally:
        memory.close()
        memory.unlink()
