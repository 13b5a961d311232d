"""The threads that call an engine: what they wait for, and whether any thread of this process may go on.

Note [Certain deadlocks]
    A deadlock ends a job, so a rank is *blocked* only where no thread of its process can ever go on. Each

    - waits for a Work without a limit, or is an engine's own;
    - or sleeps until another thread of its process wakes it: in a futex that is private and has no limit, as
      of Python's locks, of thread pools that have nothing to do, and of a call into C that waits for those;
    - or has no Python code to run, and hardly uses a core. Where a call into C waits, it may wait for such a
      thread, which may wait for data from a network: then only threads that were there before the first
      engine (MPI's) may do anything but sleep as above, and must not have run.

    It stays so as long as no wait has begun, nothing was submitted, and no thread that sleeps has run. Where
    this holds on all ranks at one time, and no operation can begin, no rank can go on. What cannot be known
    (another system than Linux, a thread that sleeps for some seconds) counts as a thread that may go on.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from ringdance.core.request import Work
from ringdance.transport.eventcount import SYS_FUTEX

__all__ = ["Callers"]

_TASKS = "/proc/self/task"
_PRIVATE = 128  # FUTEX_PRIVATE_FLAG: no other process can wake it
_HARDLY = 0.01  # of a core
_INNER = ("ringdance", "threading", "json")  # modules whose functions a wait calls
_LOCKS = ("threading", "concurrent")  # modules of which no call into C waits but for Python's locks


class Callers:
    """The threads that have called the engine of this rank.

    Any thread may change what is here, by one subscript, call or assignment each, which no lock has to guard.

    Attributes:
        waiting: what threads wait for, by a key of each wait. While there is any, all that is pending is due,
            in every set: two ranks may wait for two sets in different orders.
        submitted: when anything was submitted last (monotonic).
    """

    def __init__(self) -> None:
        self.waiting: dict[object, Work] = {}
        self.submitted = 0.0
        self._state: object = None
        self._since = self._sampled = 0.0
        self._used: dict[int, int] = {}
        _early_threads()

    def waits_in(self, set_id: int) -> bool:
        """Return whether a thread waits for a Work of a process set that is not done."""
        works = tuple(self.waiting.values())
        return any(work.request.set_id == set_id and not work.done() for work in works)

    def status(self) -> dict[str, Any]:
        """Return for ``reports.deadlock`` whether this rank is blocked, and for how long. Called in steps.

        Returns:
            ``blocked``: see Note [Certain deadlocks]; ``still``: for how long it was seen in this state, with
            the same waits; ``quiet``: since when nothing was submitted. In seconds.
        """
        now = time.monotonic()
        try:
            threads = self._threads(now)
        except OSError:  # a thread has ended, or this system has no /proc
            threads = None
        # The keys of the waits are kept, so that those of later waits differ.
        state = threads and (threads, tuple(self.waiting), self.submitted)
        if not state or state != self._state:
            self._state, self._since = state, now
        blocked = bool(state and self.waiting)
        return {"blocked": blocked, "still": now - self._since, "quiet": now - self.submitted}

    def _threads(self, now: float) -> list[tuple[int, int]] | None:
        """Return all threads, each with the time it has used if it sleeps; None if one may go on."""
        numbers = {thread.ident: thread.native_id for thread in threading.enumerate()}
        waiting, callers, unnumbered, in_c = set[int | None](), set[int](), 0, False
        for ident, frame in sys._current_frames().items():
            number = numbers.get(ident)  # None: a thread of C code, which calls Python
            if _waits(frame):
                waiting.add(number)
                unnumbered += number is None
            elif number is None:
                return None
            else:
                callers.add(number)
                in_c |= _module(frame) not in _LOCKS
        in_c |= unnumbered > 0
        before, self._used = self._used, {}
        allowed, self._sampled = _HARDLY * 1e9 * (now - self._sampled), now
        found, others = [], 0
        for number in map(int, os.listdir(_TASKS)):
            used = sleeps = 0
            if number not in waiting:
                used, sleeps = _look(number)
                self._used[number] = used
                if not used or (number in callers and not sleeps):
                    return None
                if not sleeps:
                    more = used - before.get(number, used)
                    others += more > 0 or number not in _early_threads() if in_c else more > allowed
            found.append((number, used if sleeps else 0))
        return found if others <= unnumbered else None


@functools.cache
def _early_threads() -> frozenset[int]:
    """Return the threads that this process had when its first engine began."""
    return frozenset(map(int, os.listdir(_TASKS) if os.path.isdir(_TASKS) else ()))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _waits(frame: FrameType | None) -> bool:
    """Return whether a thread only waits for a Work, without a limit, or is an engine's own."""
    while frame is not None and _module(frame) in _INNER:
        if frame.f_code is Work.wait.__code__:
            return frame.f_locals["timeout"] is None
        if frame.f_code.co_name == "_thread_main":
            return True
        frame = frame.f_back
    return False


def _look(number: int) -> tuple[int, bool]:
    """Return for how long a thread has run or wanted to, in ns, and whether only a thread can wake it."""
    with open(f"{_TASKS}/{number}/schedstat") as file:  # first: what it uses from here on is seen next time
        used = sum(map(int, file.read().split()[:2]))
    with open(f"{_TASKS}/{number}/syscall") as file:
        call = file.read().split()  # its number; the futex's address, the operation, a value, the limit
    return used, call[0] == str(SYS_FUTEX) and int(call[2], 16) & _PRIVATE > 0 and int(call[4], 16) == 0
