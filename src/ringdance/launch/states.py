"""The states of a job and the transitions between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto

_REMOTE_CLEAN_S = 3.0
_LOCAL_CLEAN_S = 6.0


class State(Enum):
    """The stages of a job. Each but the first is entered from an earlier one (``TRANSITIONS``)."""

    PREPARING = auto()  # agents create the job's directories
    STARTING = auto()  # mpiexec runs, but not all ranks do
    RUNNING = auto()  # all ranks have started
    FAILED = auto()  # something has failed; the other ranks have a moment to report what they see
    ENDED = auto()  # all ranks have exited; mpiexec may still run
    STOPPING = auto()  # ranks have received SIGTERM
    CLEANING_REMOTE = auto()  # agents on other hosts end all processes and remove all files
    CLEANING_LOCAL = auto()  # the agent on this host does the same
    DONE = auto()


class Event(Enum):
    """What moves a job from one state to another."""

    READY = auto()  # all agents are ready
    STARTED = auto()  # all ranks have started
    FAILURE = auto()  # a rank, mpiexec or a host has failed
    OVER = auto()  # all ranks have exited
    STOP = auto()  # the launcher received a signal
    TIMEOUT = auto()  # the state's deadline has passed
    CLEAN = auto()  # the agents that the state waits for have cleaned up
    LOST = auto()  # the agent on this host has exited


_S, _E = State, Event
TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    _S.PREPARING: {_E.READY: _S.STARTING, _E.FAILURE: _S.FAILED, _E.STOP: _S.STOPPING},
    _S.STARTING: {
        _E.STARTED: _S.RUNNING, _E.FAILURE: _S.FAILED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING,
    },
    _S.RUNNING: {_E.FAILURE: _S.FAILED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING},
    _S.FAILED: {
        _E.FAILURE: _S.FAILED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.STOPPING,
    },
    _S.ENDED: {
        _E.FAILURE: _S.ENDED, _E.OVER: _S.ENDED, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.CLEANING_REMOTE,
    },
    _S.STOPPING: {_E.OVER: _S.STOPPING, _E.STOP: _S.STOPPING, _E.TIMEOUT: _S.CLEANING_REMOTE},
    _S.CLEANING_REMOTE: {_E.CLEAN: _S.CLEANING_LOCAL, _E.TIMEOUT: _S.CLEANING_LOCAL},
    _S.CLEANING_LOCAL: {_E.CLEAN: _S.DONE},
    _S.DONE: {},
}  # fmt: skip
"""The next state by state and event. Other events change nothing. LOST leads from any state to DONE.

An event that does not change the state may still move its deadline forward.
"""

LIMITS = {_S.RUNNING: math.inf, _S.CLEANING_REMOTE: _REMOTE_CLEAN_S, _S.CLEANING_LOCAL: _LOCAL_CLEAN_S}
"""Seconds until the deadline of a new state. In other states an event sets it, or keeps an earlier one."""

WELL = (_S.PREPARING, _S.STARTING, _S.RUNNING)
CLEANING = (_S.CLEANING_REMOTE, _S.CLEANING_LOCAL, _S.DONE)
ENDING = (_S.STOPPING, *CLEANING)
