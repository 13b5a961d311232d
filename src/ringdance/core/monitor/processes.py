"""Access to processes on this host: their rings and their stderr."""

from __future__ import annotations

import contextlib
import mmap
import os

from ringdance.core.ring import RING_NAME, RingReader, Word, memories


def open_ring(pid: int) -> RingReader | None:
    """Return a reader for a process's ring, preferring one that is in use, or None if it has no ring."""
    ring = None
    for path in memories(pid, RING_NAME):
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                reader = RingReader(mmap.mmap(descriptor, 0))
            finally:
                os.close(descriptor)
            ring = reader if ring is None or not reader.words[Word.CLOSED] else ring
    return ring


def warn(pid: int, text: str) -> None:
    """Write a line to a process's stderr, without keeping it open or waiting for its reader."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(descriptor, f"ringdance: {text}\n".encode())
        finally:
            os.close(descriptor)
