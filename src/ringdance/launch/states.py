"""The states of a job: the transitions between them, and how long each state lasts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from enum import Enum, auto


class State(Enum):
    """The states of a job. ``TRANSITIONS`` defines how a job moves from one to the next."""

    PREPARING = auto()  # agents create the job's directories
    STARTING = auto()  # mpiexec is running, but some ranks have not started
    RUNNING = auto()  # all ranks have started
    FAILED = auto()  # something has failed; the other ranks have a moment to report what they saw
    ENDED = auto()  # all ranks have exited; mpiexec may still be running
    STOPPING = auto()  # ranks have received SIGTERM
    CLEANING_REMOTE = auto()  # agents on other hosts kill the job's processes and remove its files
    CLEANING_LOCAL = auto()  # the agent on this host kills the job's processes and removes its files
    DONE = auto()


class Event(Enum):
    """The events that may move a job from one state to another."""

    READY = auto()  # all agents are ready
    STARTED = auto()  # all ranks have started
    FAILURE = auto()  # a rank, a host, mpiexec, one of its daemons or the launcher has failed
    OVER = auto()  # all ranks have exited
    STOP = auto()  # the launcher received a signal
    TIMEOUT = auto()  # the state's deadline has passed
    CLEAN = auto()  # the agents that this state waits for have cleaned up
    LOST = auto()  # the agent on this host has exited


_S, _E = State, Event

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    _S.PREPARING: {_E.READY: _S.STARTING, _E.FAILURE: _S.FAILED, _E.STOP: _S.STOPPING},
    _S.STARTING: {_E.STARTED: _S.RUNNING, _E.FAILURE: _S.FAILED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING},
    _S.RUNNING: {_E.FAILURE: _S.FAILED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING},
    _S.FAILED: {_E.FAILURE: _S.FAILED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.STOPPING},
    _S.ENDED: {_E.FAILURE: _S.ENDED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.CLEANING_REMOTE},
    _S.STOPPING: {_E.OVER: _S.STOPPING, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.CLEANING_REMOTE},
    _S.CLEANING_REMOTE: {_E.CLEAN: _S.CLEANING_LOCAL, _E.TIMEOUT: _S.CLEANING_LOCAL},
    _S.CLEANING_LOCAL: {_E.CLEAN: _S.DONE}, _S.DONE: {},
}
"""The next state by state and event. Other events are ignored, except that LOST always leads to DONE.

An event that does not change the state may still move its deadline forward.
"""

LIMITS = {_S.RUNNING: math.inf, _S.CLEANING_REMOTE: 3.0, _S.CLEANING_LOCAL: 6.0}
"""Seconds until the deadline of a new state. In other states, events set the deadline."""

WELL = (_S.PREPARING, _S.STARTING, _S.RUNNING)
CLEANING = (_S.CLEANING_REMOTE, _S.CLEANING_LOCAL, _S.DONE)
ENDING = (_S.STOPPING, *CLEANING)


class Stage:
    """A job's state and its deadline, updated according to ``TRANSITIONS`` and ``LIMITS``.

    Args:
        start_timeout: Seconds for all ranks to start.

    Attributes:
        state: The current state.
        deadline: Time (``time.monotonic()``) until which the state lasts unless an event ends it.
    """

    def __init__(self, start_timeout: float) -> None:
        self.state = State.PREPARING
        self.deadline = time.monotonic() + start_timeout

    def follow(self, event: Event, seconds: float = math.inf) -> bool:
        """Apply an event. Returns True if the state has changed.

        Args:
            event: The event.
            seconds: Time until the deadline of the state that the event leads to, unless ``LIMITS`` defines
                that time or the current deadline is earlier.
        """
        state = State.DONE if event is Event.LOST else TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        now, changed = time.monotonic(), state is not self.state
        if changed and state in LIMITS:
            self.deadline = now + LIMITS[state]
        else:
            self.deadline = min(now + seconds, self.deadline)
        self.state = state
        return changed
