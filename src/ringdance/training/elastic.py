"""Training that goes on after an error: state that is committed, and a loop that goes back to it.

::

    state = ObjectState(epoch=0)

    @run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

    train(state)

When a collective fails, every rank goes back to its last commit, leaves the job, joins it again, takes rank
0's state, and calls the function anew. Any other exception ends the job as ever. Today the processes
of a job stay the same: if one has ended, the error is raised on all others. The state is
told of other hosts by ``on_hosts_updated``; ``check_host_updates`` then leaves the function on all ranks at
the same call.
"""

from __future__ import annotations

import copy
import enum
import functools
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ringdance import session
from ringdance.errors import ArgumentError, CollectiveError, HostsUpdatedInterrupt, NotInitializedError
from ringdance.training import basics
from ringdance.training.objects import broadcast_object

__all__ = [
    "HostUpdateResult", "NotificationManager", "ObjectState", "State", "notification_manager", "restart",
    "run", "run_fn",
]

_log = logging.getLogger("ringdance")

# So many times in a row training may fail without a new commit: an error that comes each time is no accident.
MOST_FAILURES = 10

T = TypeVar("T")
Broadcast = Callable[[Any], Any]


class HostUpdateResult(enum.IntFlag):
    """What became of the job's hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """What is trained, and how far training has come. The base of states for each framework.

    Subclasses define ``save``, ``restore`` and ``sync``, and ``reset`` if need be.

    Args:
        bcast_object: returns rank 0's object on all ranks; by default ``broadcast_object``.
        get_rank: returns this process's rank.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        # A name of its own: a commit must not meet a broadcast of the script.
        self._bcast_object = bcast_object or functools.partial(broadcast_object, name="elastic.state")
        self._rank = get_rank or basics.rank
        self._host_messages: SimpleQueue[tuple[float, int]] = SimpleQueue()
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._saves = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called, in this order, each time the job has started again.

        The number of ranks may be another then: this is the place to scale the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The job has started again: forget old news of hosts, ``reset()``, call the callbacks."""
        self._take_messages()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take in that hosts have changed. From any thread; only what rank 0 is told counts.

        Args:
            timestamp: when, in seconds; for people.
            update_res: a ``HostUpdateResult``.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, then ``check_host_updates()``; on all ranks alike."""
        self.save()
        self._saves += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Learn from rank 0 whether hosts have changed. A collective: all ranks call it equally often.

        Every notification counts that has come since the job (re)started, even if several came
        within one second.

        Raises:
            HostsUpdatedInterrupt: they have; on all ranks at the same call. ``skip_sync`` if some have
                only gone.
        """
        result = self._bcast_object(self._take_messages())
        if result != HostUpdateResult.no_update:
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)

    def _take_messages(self) -> int:
        result = 0
        try:
            while True:
                result |= int(self._host_messages.get_nowait()[1])
        except Empty:
            return result

    def save(self) -> None:
        """Keep a copy of everything, in memory, to which ``restore`` goes back."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state. A collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """The job has started again, perhaps with other ranks: adapt to it. Does nothing here."""


class ObjectState(State):
    """Plain attributes: ``state.epoch`` for ``ObjectState(epoch=0)``.

    A save copies lists, dicts, sets, arrays and what they hold, so that changing them in place does not
    change what was saved; objects of other classes are kept as they are.

    ``sync`` gives all ranks both what rank 0 has now and what it saved last: values that were changed
    since the last commit are kept when hosts change, as weights are, and ``restore`` goes back to a
    state in which everything is of one moment.

    Args:
        bcast_object, get_rank: see ``State``.
        kwargs: names and first values of the attributes; they count as saved.

    Raises:
        ArgumentError: an attribute has the name of a method.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        taken = [name for name in kwargs if hasattr(type(self), name)]
        if taken:
            raise ArgumentError(f"{type(self).__name__}: {taken[0]!r} is a method; give it another name.")
        self._saved_state = {name: self._copied(value) for name, value in kwargs.items()}
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep a copy of the attributes."""
        self._saved_state = {name: self._copied(getattr(self, name)) for name in self._saved_state}
        self._saves += 1

    def restore(self) -> None:
        """Set the attributes to what was saved last."""
        for name, value in self._saved_state.items():
            setattr(self, name, self._copied(value))

    def sync(self) -> None:
        """Take over rank 0's attributes: what they are, and what was saved of them last."""
        if not self._saved_state:
            return
        values = {name: getattr(self, name) for name in self._saved_state}
        values, saved = self._bcast_object((values, self._saved_state))
        if self._rank() != 0:
            self._saved_state = saved
            for name, value in values.items():
                setattr(self, name, value)

    def _copied(self, value: Any) -> Any:
        """Copy containers and arrays, all the way down; the rest may be tied to other objects."""
        kind = type(value)
        if kind in (dict, OrderedDict, defaultdict, Counter, list, deque):
            made = copy.copy(value)
            for key in made if isinstance(made, dict) else range(len(made)):
                made[key] = self._copied(made[key])
            return made
        if kind is tuple:
            return tuple(map(self._copied, value))
        return copy.copy(value) if kind in (set, bytearray, np.ndarray) else value


class NotificationManager:
    """Brings news of hosts to the states in training. Nothing sends any yet: hosts do not change."""

    def __init__(self) -> None:
        self._listeners: list[State] = []

    def init(self) -> None:
        """Do nothing: there is no service to start."""

    def register_listener(self, listener: State) -> None:
        """Tell this state from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: State) -> None:
        """Tell it no more."""
        self._listeners = [one for one in self._listeners if one is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all states; from any thread."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()


def restart() -> None:
    """Leave the job and join it again; all ranks do. Process sets are to be added again then.

    Raises:
        RankLostError: a process has ended, or does not come within the setting ``elastic_timeout``.
    """
    basics.init(session.regroup())


def run_fn(func: Callable[..., T], reset: Callable[[], Any]) -> Callable[..., T]:
    """Return ``func`` in a loop that starts it again after errors of collectives; see the module.

    The loop gives up, and raises the error, where going on is impossible (a process has ended) or
    has been tried ten times without a new commit.

    Args:
        func: takes a ``State`` first.
        reset: ends the job and starts it again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        if not all(hasattr(state, name) for name in ("sync", "restore", "on_reset")):
            raise ArgumentError(
                f"{func.__name__}() needs an elastic state as its first argument, got {type(state).__name__}."
            )
        notification_manager.init()
        notification_manager.register_listener(state)
        failures = _Failures(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                except NotInitializedError:
                    raise  # nothing has failed: init() is missing
                except CollectiveError as error:
                    failures.note(error)
                    state.restore()
                    skip_sync = False
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper


class _Failures:
    """Counts failures since the last commit, and decides whether to go on."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._saves = self._count = 0

    def note(self, error: CollectiveError) -> None:
        """Return to have training start again, or raise the error with a reason."""
        saves = getattr(self._state, "_saves", 0)
        self._count = 1 if saves != self._saves else self._count + 1
        self._saves = saves
        found = session.engine() if session.is_initialized() else None
        if found is not None and found.departed:
            error.add_note(
                f"ringdance: {found.departed} has ended, and cannot be started again within a running job: "
                "the other ranks end too. Start the job again from a checkpoint."
            )
            raise error
        if self._count > MOST_FAILURES:
            error.add_note(
                f"ringdance: training has gone back to its last commit {MOST_FAILURES} times in a row and "
                "failed each time; it is given up."
            )
            raise error
        if found is None or found.rank == 0:
            _log.warning(
                "ringdance: %s: %s. All ranks go back to the last commit and start again (%d of at most %d "
                "times without a new commit).",
                type(error).__name__, str(error).rstrip("."), self._count, MOST_FAILURES,
            )  # fmt: skip


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function whose first argument is a state; see the module."""
    return run_fn(func, restart)
