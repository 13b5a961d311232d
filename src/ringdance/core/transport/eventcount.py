"""Wait for other ranks without using CPU time. Contains the Linux-only parts of the transports.

If all peers of a rank are on its host, it waits on a *futex*: a 32-bit word in the window, which a peer
changes before it wakes the waiter. The peer makes a system call only if the "waiting" flag is set. The peer
may miss the flag (x86 lets a load pass an earlier store), so every wait ends after at most 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from typing import Any

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG, because processes share the word
_MACHINE = platform.machine()
SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(_MACHINE, 0)
HAVE_FUTEX = sys.platform == "linux" and SYS_FUTEX > 0
# Counters in the window require that stores become visible in program order, which x86 guarantees.
NEEDS_FENCE = _MACHINE not in ("x86_64", "AMD64", "i686")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall: Any = ctypes.CDLL(None).syscall if HAVE_FUTEX else None
_number = ctypes.c_long(SYS_FUTEX)

yield_core = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))


class EventCount:
    """Lets the ranks of one host wake each other.

    A waiter calls ``prepare_wait``, checks its condition, then calls ``wait`` or ``cancel_wait``.

    Args:
        words: An int32 memoryview with two words for each rank: a counter that each notification increments,
            and a flag that is set while the rank waits.
        address: Address of ``words[0]`` in this process.
        stride: Distance, in words, between the pairs of two consecutive ranks.
        index: This rank's local index.
    """

    def __init__(self, words: memoryview, address: int, stride: int, index: int) -> None:
        self.words = words
        self._stride = stride
        self._own = index * stride
        self._address = address
        self._spare: Any = None

    def flag_position(self, index: int) -> int:
        """Return the position, in ``words``, of the flag for the rank with local index ``index``."""
        return index * self._stride + 1

    def close(self) -> None:
        """Detach from the shared memory, which is about to be freed."""
        spare = (ctypes.c_int32 * len(self.words))()
        self.words = memoryview(spare).cast("B").cast("i")
        self._address = ctypes.addressof(spare)
        self._spare = spare

    def notify(self, index: int) -> None:
        """Wake the rank with local index ``index`` if it is waiting."""
        words, at = self.words, index * self._stride
        if words[at + 1]:
            words[at] = (words[at] + 1) & 0x7FFFFFFF
            if HAVE_FUTEX:
                word = ctypes.c_void_p(self._address + 4 * at)
                _syscall(_number, word, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def notify_self(self) -> None:
        """Wake a waiting thread of this rank. Called after another thread has submitted a request."""
        self.notify(self._own // self._stride)

    def prepare_wait(self) -> int:
        """Announce that this rank will wait. Returns the value to pass to ``wait``."""
        self.words[self._own + 1] = 1
        return self.words[self._own]

    def cancel_wait(self) -> None:
        """Undo ``prepare_wait``. Called instead of ``wait`` if the condition already holds."""
        self.words[self._own + 1] = 0

    def wait(self, seen: int, seconds: float) -> None:
        """Wait at most 20 ms for a notification that is sent after ``prepare_wait`` returned ``seen``."""
        seconds = min(seconds, 0.02)
        if HAVE_FUTEX:
            word = ctypes.c_void_p(self._address + 4 * self._own)
            limit = ctypes.byref(_Timespec(0, int(seconds * 1e9)))
            _syscall(_number, word, _FUTEX_WAIT, seen, limit, None, 0)
        else:
            time.sleep(min(seconds, 0.0005))
        self.words[self._own + 1] = 0


def process_state(pid: int) -> str:
    """Return the state of the process ``pid`` on this host: "gone", "stopped" or "running"."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "gone"
    except (OSError, IndexError):  # the process belongs to another user, or /proc does not exist
        return "running"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")
