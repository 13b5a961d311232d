"""The states of a job: the transitions between them, and how long each state lasts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto


class State(Enum):
    """The states of a job. ``TRANSITIONS`` defines how a job moves from one to the next."""

    PREPARING = auto()  # agents create the job's directories
    STARTING = auto()  # mpiexec runs, but not all ranks do
    RUNNING = auto()  # all ranks have started
    FAILED = auto()  # something has failed; the other ranks have a moment to report their view
    ENDED = auto()  # all ranks have exited; mpiexec may still be running
    STOPPING = auto()  # ranks have received SIGTERM
    CLEANING_REMOTE = auto()  # agents on other hosts end all processes and remove all files
    CLEANING_LOCAL = auto()  # the agent on this host does the same
    DONE = auto()


class Event(Enum):
    """The events that may move a job from one state to another."""

    READY = auto()  # all agents are ready
    STARTED = auto()  # all ranks have started
    FAILURE = auto()  # a host, one of its daemons or the launcher has failed, or mpiexec was killed
    MPIEXEC_EXITED = auto()  # before all ranks
    RANK_FAILED = auto()  # the rank may have reported why, or was ended by a signal that asks it to exit
    RANK_KILLED = auto()  # the rank cannot have reported why
    OVER = auto()  # all ranks have exited; mpiexec is still running
    OVER_LATE = auto()  # the same, but after a failure or the end of mpiexec, or while the job was stopping
    COMPLETE = auto()  # all ranks and mpiexec have exited
    STOP = auto()  # the launcher received a signal
    TIMEOUT = auto()  # the state's deadline has passed
    CLEAN = auto()  # the agents that this state waits for have cleaned up
    LOST = auto()  # the agent on this host has exited


class Wait(Enum):
    """Reasons to extend a state's deadline. The job determines for how many seconds a reason applies."""

    OWN_FAILURE = auto()  # a running rank has reported its own failure; its exit code becomes the job's
    GRACE = auto()  # ranks have time to exit after a signal to the launcher
    SILENT_HOST = auto()  # a host may be lost, which may be the cause of the failure
    CAUSE = auto()  # another host may report the failure that the known failures follow from
    REPORTS = auto()  # agents are still sending results and output, which may be large


_S, _E = State, Event
_FAILURES = (_E.FAILURE, _E.MPIEXEC_EXITED, _E.RANK_FAILED, _E.RANK_KILLED)
_ENDS = (_E.OVER, _E.OVER_LATE, _E.COMPLETE)
_FAIL, _END = dict.fromkeys(_FAILURES, _S.FAILED), dict.fromkeys(_ENDS, _S.ENDED)

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    _S.PREPARING: {_E.READY: _S.STARTING, _E.FAILURE: _S.FAILED, _E.STOP: _S.STOPPING},
    _S.STARTING: {_E.STARTED: _S.RUNNING, **_FAIL, **_END, _E.STOP: _S.STOPPING},
    _S.RUNNING: {**_FAIL, **_END, _E.STOP: _S.STOPPING},
    _S.FAILED: {**_FAIL, **_END, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.STOPPING},
    _S.ENDED: {
        **dict.fromkeys(_FAILURES, _S.ENDED), **_END, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.CLEANING_REMOTE,
    },
    _S.STOPPING: {
        **dict.fromkeys(_ENDS, _S.STOPPING), _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.CLEANING_REMOTE,
    },
    _S.CLEANING_REMOTE: {_E.CLEAN: _S.CLEANING_LOCAL, _E.TIMEOUT: _S.CLEANING_LOCAL},
    _S.CLEANING_LOCAL: {_E.CLEAN: _S.DONE},
    _S.DONE: {},
}  # fmt: skip
"""The next state by state and event. Other events change nothing. LOST leads from any state to DONE.

An event that does not change the state may still move its deadline forward (``SECONDS``).
"""

LIMITS = {_S.RUNNING: math.inf, _S.CLEANING_REMOTE: 3.0, _S.CLEANING_LOCAL: 6.0}
"""Seconds until the deadline of a new state. In other states events set it (``SECONDS``)."""

SECONDS: Mapping[Event, float] = {
    _E.FAILURE: 0.1,
    _E.MPIEXEC_EXITED: 0.3,  # the ranks' reports may still be unread in the sockets
    # The other ranks get this long to report what they see. The launcher may also receive the signal that
    # ended the rank a little later.
    _E.RANK_FAILED: 1.0,
    _E.RANK_KILLED: 0.5,
    _E.OVER: 3.0,  # for mpiexec to exit; it sometimes hangs
    _E.OVER_LATE: 0.05,
    _E.COMPLETE: 0.0,
    _E.STOP: 0.8,  # until the launcher says how long it waits for the ranks
    _E.TIMEOUT: 0.2,  # from SIGTERM after a failure until the ranks are killed
}
"""Seconds from an event to the deadline of the state that it leads to, unless that deadline is earlier."""

WAITS: Mapping[State, tuple[Wait, ...]] = {
    _S.FAILED: (Wait.OWN_FAILURE, Wait.SILENT_HOST, Wait.CAUSE),
    _S.ENDED: (Wait.SILENT_HOST, Wait.CAUSE),
    _S.STOPPING: (Wait.GRACE, Wait.SILENT_HOST, Wait.CAUSE),
    _S.CLEANING_REMOTE: (Wait.REPORTS,),
    _S.CLEANING_LOCAL: (Wait.REPORTS,),
}
"""Why a state may last longer than its deadline. The first reason that applies extends it."""

EXTENSIONS: Mapping[Wait, tuple[float, float]] = {
    Wait.OWN_FAILURE: (1.0, 0.0),
    Wait.SILENT_HOST: (0.05, math.inf),
    Wait.CAUSE: (0.05, 1.0),
}
"""How far a deadline is extended, and how long after the first extension for this reason, in seconds.

Other reasons have no such limits: the job says how long they last.
"""

WELL = (_S.PREPARING, _S.STARTING, _S.RUNNING)
CLEANING = (_S.CLEANING_REMOTE, _S.CLEANING_LOCAL, _S.DONE)
ENDING = (_S.STOPPING, *CLEANING)


class Stage:
    """A job's state and its deadline, which follow the tables.

    Args:
        start_timeout: Seconds for all ranks to start.

    Attributes:
        state: The current state.
        deadline: Time (``time.monotonic()``) until which the state lasts unless an event ends it.
    """

    def __init__(self, start_timeout: float) -> None:
        self.state = State.PREPARING
        self.deadline = time.monotonic() + start_timeout
        self._first: dict[Wait, float] = {}  # when a deadline was first extended for this reason

    def follow(self, event: Event, at_most: float = math.inf) -> bool:
        """Apply an event. Returns True if the state has changed.

        Args:
            event: The event.
            at_most: Upper bound on the seconds until the deadline, if less than in ``SECONDS``.
        """
        state = State.DONE if event is Event.LOST else TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        now, changed = time.monotonic(), state is not self.state
        if changed and state in LIMITS:
            self.deadline = now + LIMITS[state]
        else:
            self.deadline = min(now + min(SECONDS.get(event, math.inf), at_most), self.deadline)
        self.state = state
        return changed

    def extend(self, wanted: Callable[[Wait], float]) -> bool:
        """Extend the deadline, which has passed, if there is a reason. Otherwise clear it and return False.

        Args:
            wanted: Returns the number of seconds for which a reason applies, 0 if it does not.
        """
        self.deadline, now = math.inf, time.monotonic()
        for reason in WAITS.get(self.state, ()):
            step, limit = EXTENSIONS.get(reason, (math.inf, math.inf))
            if now - self._first.get(reason, now) <= limit and (seconds := wanted(reason)) > 0:
                self._first.setdefault(reason, now)
                self.deadline = now + min(seconds, step)
                return True
        return False
