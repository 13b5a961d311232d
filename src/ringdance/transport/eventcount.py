"""Waiting that leaves the cores to the computation. Everything Linux-only of the transports is here.

On one host a rank that waits sleeps on a *futex*: a 32-bit word in the window, which a peer
changes before it wakes the sleeper. Waking costs the peer a system call only when the
"sleeping" flag is set. The flag can be missed (x86 lets a load pass an earlier store), so
every sleep ends by itself after at most 20 ms.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import sys
import time
from typing import Any

__all__ = ["HAVE_FUTEX", "NEEDS_FENCE", "Doorbell", "process_state", "yield_core"]

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_MACHINE = platform.machine()
HAVE_FUTEX = sys.platform == "linux" and _MACHINE in _SYS_FUTEX
# Counters in the window rely on stores becoming visible in program order, as x86 promises.
NEEDS_FENCE = _MACHINE not in ("x86_64", "AMD64", "i686")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load_syscall() -> Any:
    library = ctypes.CDLL(None)
    return library.syscall


_syscall: Any = _load_syscall() if HAVE_FUTEX else None
_number = ctypes.c_long(_SYS_FUTEX.get(_MACHINE, 0))

yield_core = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))


class Doorbell:
    """The words by which the ranks of one host wake each other.

    Args:
        words: int32 memoryview, two words for each rank, ``stride`` apart: a counter that is
            bumped to ring, and a flag that says whether its owner sleeps.
        address: address of ``words[0]`` in this process.
        stride: words from one rank's pair to the next.
        index: this rank's place on the host.
    """

    def __init__(self, words: memoryview, address: int, stride: int, index: int) -> None:
        self.words = words
        self._stride = stride
        self._own = index * stride
        self._address = address
        self._spare: Any = None

    def flag_of(self, index: int) -> int:
        """Return where in ``words`` it stands whether the rank at place ``index`` sleeps."""
        return index * self._stride + 1

    def close(self) -> None:
        """Leave the shared memory, which is about to go: a thread that still sleeps or rings meets nobody."""
        spare = (ctypes.c_int32 * len(self.words))()
        self.words = memoryview(spare).cast("B").cast("i")
        self._address = ctypes.addressof(spare)
        self._spare = spare

    def ring(self, index: int) -> None:
        """Wake the rank at place ``index`` if it sleeps."""
        words, at = self.words, index * self._stride
        if words[at + 1]:
            words[at] = (words[at] + 1) & 0x7FFFFFFF
            if HAVE_FUTEX:
                _syscall(
                    _number, ctypes.c_void_p(self._address + 4 * at), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0
                )

    def ring_self(self) -> None:
        """Wake a thread of this rank that sleeps, because another thread has news for it."""
        self.ring(self._own // self._stride)

    def glance(self) -> int:
        """Say that this rank is about to sleep; return what to pass to ``sleep``."""
        self.words[self._own + 1] = 1
        return self.words[self._own]

    def awake(self) -> None:
        """Take back ``glance``: something turned up in between."""
        self.words[self._own + 1] = 0

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until rung since ``glance`` returned ``seen``, or for ``seconds`` (at most 20 ms)."""
        seconds = min(seconds, 0.02)
        if HAVE_FUTEX:
            limit = _Timespec(0, int(seconds * 1e9))
            _syscall(
                _number,
                ctypes.c_void_p(self._address + 4 * self._own),
                _FUTEX_WAIT,
                seen,
                ctypes.byref(limit),
                None,
                0,
            )
        else:
            time.sleep(min(seconds, 0.0005))
        self.words[self._own + 1] = 0


def process_state(pid: int) -> str:
    """Return what the process ``pid`` of this host does: "gone", "stopped" or "running"."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "running"
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "running"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")
