"""The threads that call an engine: what they wait for, and whether any thread in this process can continue.

Note [Certain deadlocks]
    A deadlock ends a job, so a rank counts as *blocked* only if no thread of its process can ever continue.
    This requires every thread to be in one of these states:

    - It has called ``Work.wait`` without a timeout, or it is an engine thread.
    - It sleeps in a private futex without a timeout, so only another thread of its process can wake it.
      Threads that wait for a Python lock sleep like this, as do idle threads of a thread pool, and calls
      into C that wait for either of them.
    - It has no Python frames, and it is not running. If another thread is in a call into C, that call may be
      waiting for such a thread, which may in turn be waiting for data from the network. In this case, threads
      without Python frames must also sleep in a futex. Threads that existed before the first engine started
      (MPI's threads) are exempt: they may wait in any system call, provided that they do not run.

    A rank stays blocked until a wait starts, a request is submitted, or a sleeping thread runs. If all ranks
    are blocked at the same time, and no operation can start, no rank can ever continue. If it is uncertain
    whether a thread can continue (on a system other than Linux, while a thread sleeps for some seconds, or
    while a timer that sends a signal is running), the rank does not count as blocked. If all Python threads
    are waiting for locks, three cases are not covered: a sleeping C thread that will call Python later, a
    signal handler that releases a lock, and a C thread that the user's code started before ``init()`` and
    that ends a wait in C.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from ringdance.core.reports.procfs import task_ids, wakeable
from ringdance.core.request import Work
from ringdance.core.transfers import Transfer

_IN_WAITS = ("ringdance", "threading", "json")  # packages whose frames may be on a waiting thread's stack
_LOCKS = frozenset({"threading", "concurrent"})  # packages whose calls into C wait only for Python locks
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_early_threads = functools.cache(task_ids)  # threads that existed when the first engine started


class Callers:
    """The threads that have called this rank's engine.

    Threads: any thread may change these attributes. Each change is a single subscript operation, call
    or assignment, so no lock is needed.

    Attributes:
        waiting: Works that threads are waiting for, by a key that is unique to each wait. While any thread
            waits, all pending requests of all sets are due, because two ranks may wait for the same two
            sets in different orders.
        submitted: Time of the last submission (monotonic).
        transfers: Messages that threads are waiting for, by a key that is unique to each wait.
        messages: Number of waits for messages that have ended.
    """

    def __init__(self) -> None:
        self.waiting: dict[object, Work] = {}
        self.submitted = 0.0
        self.transfers: dict[object, Transfer] = {}
        self.messages = 0
        self._state: object = None
        self._since = 0.0
        _early_threads(os.getpid())

    def waits_in(self, set_id: int) -> bool:
        """Return True if a thread is waiting for an incomplete Work of a process set."""
        works = list(self.waiting.values())  # Note [Copies of dictionaries]
        return any(work.request.set_id == set_id and not work.done() for work in works)

    def status(self) -> dict[str, Any]:
        """Return whether this rank is blocked, and for how long, for use by ``reports.deadlock``.

        Thread: the one stepping the engine.

        Returns:
            ``blocked``: True if this rank is blocked, see Note [Certain deadlocks]. ``still``: Seconds
            since the threads' states, the waits or the last submission changed. ``quiet``: Seconds since
            the last submission.
        """
        now, threads = time.monotonic(), self._threads()
        # The state holds references to the keys of the waits, so no later wait can reuse one of these keys.
        state = threads and (threads, tuple(list(self.waiting)), self.submitted)
        if not state or state != self._state:
            self._state, self._since = state, now
        still, quiet = now - self._since, now - self.submitted
        return {"blocked": bool(state and self.waiting), "still": still, "quiet": quiet}

    def _threads(self) -> list[tuple[int, int]] | None:
        """Return the threads that are not waiting for a Work, or None if any thread can continue.

        Each entry is a thread's kernel id and its time from ``wakeable``, or 0 if the time does not matter.
        """
        numbers = {thread.ident: thread.native_id or 0 for thread in threading.enumerate()}
        # Threads created in C that have called into Python get a negative key, because their kernel thread
        # ids are unknown.
        frames = {numbers.get(ident, -ident): frame for ident, frame in sys._current_frames().items()}
        waiting = {number for number, frame in frames.items() if _waits(frame)}
        callers = {number: _package(frame) for number, frame in frames.items() if number not in waiting}
        unknown, early = sum(number < 0 for number in waiting), _early_threads(os.getpid())
        in_c = unknown > 0 or not _LOCKS.issuperset(callers.values())
        states = {number: wakeable(number) for number in task_ids(os.getpid()) if number not in waiting}
        awake = {number for number, (_, doing) in states.items() if doing != "sleeps"}
        others = [n for n in awake if states[n][1] == "runs" or (in_c and n not in early)]
        timed = any(signal.getitimer(timer)[0] for timer in _TIMERS)
        if timed or len(others) > unknown or not states.keys() - awake >= callers.keys():
            return None
        matter = states.keys() - (awake - set(early if in_c else ()))
        return [(number, used if number in matter else 0) for number, (used, _) in states.items()]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _waits(frame: FrameType | None) -> bool:
    """Return True if a thread has called ``Work.wait`` without a timeout, or is an engine thread."""
    while isinstance(frame, FrameType) and _package(frame) in _IN_WAITS:
        if frame.f_code is Work.wait.__code__:
            return frame.f_locals["timeout"] is None
        if frame.f_code.co_name == "_thread_main":
            return True
        frame = frame.f_back
    return False
