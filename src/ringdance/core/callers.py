"""The threads that call an engine: what they wait for, and whether any thread of this process may go on.

Note [Certain deadlocks]
    A deadlock ends a job, so a rank is *blocked* only where no thread of its process can ever go on. Each

    - waits for a Work without a limit, or is an engine's own;
    - or sleeps until another thread of its process wakes it: in a futex that is private and has no limit, as
      of Python's locks, of thread pools that have nothing to do, and of a call into C that waits for those;
    - or has no Python code to run, and does not run. Where a call into C waits, it may wait for such a
      thread, which may wait for data from a network: then these must sleep as above, too, but those that
      were there before the first engine (MPI's), which must not have run.

    It stays so as long as no wait has begun, nothing was submitted, and no thread that sleeps has run. Where
    this holds on all ranks at one time, and no operation can begin, no rank can go on. What cannot be known
    (another system than Linux, a thread that sleeps for some seconds, a timer that sends a signal) counts as
    a thread that may go on. Not foreseen, where all of Python waits for locks: a thread of C code that has
    slept, and calls Python; a signal whose handler releases one; a thread of the user's C code from before
    ``init()`` that ends a wait in C.
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

_IN_WAITS = ("ringdance", "threading", "json")  # packages whose functions a wait calls
_LOCKS = frozenset({"threading", "concurrent"})  # in which no call into C waits but for Python's locks
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_early_threads = functools.cache(task_ids)  # of the process, when its first engine began


class Callers:
    """The threads that have called the engine of this rank.

    Any thread may change what is here, by one subscript, call or assignment each, which no lock has to guard.

    Attributes:
        waiting: what threads wait for, by a key of each wait. While there is any, all that is pending is due,
            in every set: two ranks may wait for two sets in different orders.
        submitted: when anything was submitted last (monotonic).
        transfers: The messages that threads wait for, by a key of each wait.
        messages: How many of those waits have ended.
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
        """Return whether a thread waits for a Work of a process set that is not done."""
        works = list(self.waiting.values())  # Note [Copies of dictionaries]
        return any(work.request.set_id == set_id and not work.done() for work in works)

    def status(self) -> dict[str, Any]:
        """Return for ``reports.deadlock`` whether this rank is blocked, and for how long. Called in steps.

        Returns:
            ``blocked``: see Note [Certain deadlocks]; ``still``: for how long it was seen in this state, with
            the same waits; ``quiet``: since when nothing was submitted. In seconds.
        """
        now, threads = time.monotonic(), self._threads()
        # The keys of the waits are kept, so that those of later waits differ.
        state = threads and (threads, tuple(list(self.waiting)), self.submitted)
        if not state or state != self._state:
            self._state, self._since = state, now
        still, quiet = now - self._since, now - self.submitted
        return {"blocked": bool(state and self.waiting), "still": still, "quiet": quiet}

    def _threads(self) -> list[tuple[int, int]] | None:
        """Return the threads that do not wait, each with the time it has used; None if one may go on.

        That time is 0 for those of which it does not matter.
        """
        numbers = {thread.ident: thread.native_id or 0 for thread in threading.enumerate()}
        # Negative: a thread of C code that calls Python, so that the kernel's number is not known.
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
    """Return whether a thread only waits for a Work, without a limit, or is an engine's own."""
    while isinstance(frame, FrameType) and _package(frame) in _IN_WAITS:
        if frame.f_code is Work.wait.__code__:
            return frame.f_locals["timeout"] is None
        if frame.f_code.co_name == "_thread_main":
            return True
        frame = frame.f_back
    return False
