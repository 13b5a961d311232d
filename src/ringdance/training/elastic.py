"""Training that continues after an error, with a committed state and a loop that restores it and retries.

::

    state = ObjectState(epoch=0)

    @run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

    train(state)

When a collective fails, every rank restores its last commit, leaves the job, rejoins it, receives rank 0's
state and calls the function again. Any other exception ends the job. Processes and hosts are never added or
replaced: if a process has exited, the error is raised on all other ranks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from ringdance.errors import ArgumentError, CollectiveError, HostsUpdatedInterrupt, NotInitializedError
from ringdance.training import basics, session
from ringdance.training.embedding import forget_lookups
from ringdance.training.objects import broadcast_object

_log = logging.getLogger("ringdance")

# Maximum number of consecutive failures without a new commit.
MOST_FAILURES = 10

T = TypeVar("T")
Broadcast = Callable[[Any], Any]


class State:
    """The state of a training run. Base class for the states of all frameworks.

    Subclasses define ``save``, ``restore`` and ``sync``, and ``reset`` if needed.

    Args:
        bcast_object: Function that returns rank 0's object on all ranks. Defaults to ``broadcast_object``.
        get_rank: Function that returns this process's rank.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        # A separate name, so that this call cannot match one of the script's broadcasts.
        self._bcast_object = bcast_object or functools.partial(broadcast_object, name="elastic.state")
        self._rank = get_rank or basics.rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._saves = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call after each restart of the job, in the given order.

        The number of ranks may have changed, so this is the place to rescale the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset()`` and the callbacks after the job has restarted."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state. All ranks must call this at the same point."""
        for wait in _before_commit:
            wait()
        if session.is_initialized():  # A failed exchange on a device gives wrong values, but no error.
            session.engine().await_devices()
            if session.engine().end.broken is not None:
                raise session.engine().end.error()
        self.save()
        self._saves += 1

    def check_host_updates(self) -> None:
        """Do nothing, because the hosts of a job never change. Provided for scripts written for Horovod."""

    def save(self) -> None:
        """Keep a copy of the state in memory for ``restore``."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all ranks. A collective call."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the restarted job, whose ranks may have changed. Does nothing in this class."""


class ObjectState(State):
    """A state that consists of plain attributes: ``state = ObjectState(epoch=0)`` sets ``state.epoch``.

    ``save`` copies lists, dicts, sets, arrays and their contents, so that changing them in place does not
    change the saved state. Objects of other classes are not copied.

    ``sync`` sends rank 0's current and last saved values to all ranks, so that a later ``restore`` restores
    the same state on all ranks.

    Args:
        bcast_object, get_rank: Passed on to ``State``.
        kwargs: Names and initial values of the attributes. The initial values count as the first save.

    Raises:
        ArgumentError: An attribute has the same name as a method.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        taken = [name for name in kwargs if hasattr(type(self), name)]
        if taken:
            raise ArgumentError(f"{type(self).__name__}: {taken[0]!r} is a method. Use a different name.")
        self._saved_state = {name: self._copied(value) for name, value in kwargs.items()}
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep a copy of the attributes."""
        self._saved_state = {name: self._copied(getattr(self, name)) for name in self._saved_state}
        self._saves += 1

    def restore(self) -> None:
        """Restore the last saved attributes, and discard embedding lookups made since then."""
        forget_lookups()
        for name, value in self._saved_state.items():
            setattr(self, name, self._copied(value))

    def sync(self) -> None:
        """Copy both the current and the last saved attributes from rank 0 to all ranks."""
        if not self._saved_state:
            return
        values = {name: getattr(self, name) for name in self._saved_state}
        values, saved = self._bcast_object((values, self._saved_state))
        if self._rank() != 0:
            self._saved_state = saved
            for name, value in values.items():
                setattr(self, name, value)

    def _copied(self, value: Any) -> Any:
        """Return a deep copy of containers and arrays. Other objects are not copied."""
        kind = type(value)
        if kind in (dict, OrderedDict, defaultdict, Counter, list, deque):
            copied = copy.copy(value)
            for key in copied if isinstance(copied, dict) else range(len(copied)):
                copied[key] = self._copied(copied[key])
            return copied
        if kind is tuple:
            return tuple(map(self._copied, value))
        return copy.copy(value) if kind in (set, bytearray, np.ndarray) else value


class VariablesState(ObjectState):
    """A state that consists of a framework's variables, which subclasses access, and plain attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._values = self._read()

    def _read(self) -> list[Any]:
        """Return copies of the variables' values."""
        raise NotImplementedError

    def _assign(self, values: list[Any]) -> None:
        """Set the variables to ``values``."""
        raise NotImplementedError

    def _broadcast(self) -> None:
        """Set the variables on all ranks to rank 0's values."""
        raise NotImplementedError

    def save(self) -> None:
        """Keep a copy of all variables and attributes."""
        self._values = self._read()
        super().save()

    def restore(self) -> None:
        """Restore the last saved variables and attributes."""
        self._assign(self._values)
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's variables and attributes to all ranks, and save the variables. A collective call."""
        self._broadcast()
        self._values = self._read()
        super().sync()


def restart() -> None:
    """Leave and rejoin the job. All ranks call this. The script must add its process sets again.

    Raises:
        RankLostError: A process has exited, or does not rejoin within the time limit ``elastic_timeout``.
    """
    basics.init(session.regroup())


def run_fn(func: Callable[..., T], reset: Callable[[], Any]) -> Callable[..., T]:
    """Wrap ``func`` in a loop that restarts it after a collective has failed. See the module docstring.

    The loop gives up and raises the error if a process has exited, or if training fails more than ten times
    in a row without a new commit.

    Args:
        func: Function whose first parameter is a ``State``.
        reset: Function that leaves the job and rejoins it.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        if not all(hasattr(state, name) for name in ("sync", "restore", "on_reset")):
            raise ArgumentError(
                f"{func.__name__}() needs an elastic state as its first argument, got {type(state).__name__}."
            )
        failures = _Failures(state)
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:  # Raised by scripts that override check_host_updates.
                skip_sync = interrupt.skip_sync
            except NotInitializedError:
                raise  # Nothing has failed, but the script forgot to call init().
            except CollectiveError as error:
                failures.note(error)
                state.restore()
                skip_sync = False
            reset()
            state.on_reset()

    return wrapper


class _Failures:
    """Counts the failures since the last commit, and limits their number."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._saves = self._count = 0

    def note(self, error: CollectiveError) -> None:
        """Count a failure. If training cannot restart, raise the error with a note that gives the reason."""
        saves = getattr(self._state, "_saves", 0)
        self._count = 1 if saves != self._saves else self._count + 1
        self._saves = saves
        engine = session.engine() if session.is_initialized() else None
        if engine is not None and engine.end.departed:
            error.add_note(
                f"ringdance: {engine.end.departed} has exited, and cannot be restarted within a running job, "
                "so the other ranks exit too. Start the job again from a checkpoint."
            )
            raise error
        if self._count > MOST_FAILURES:
            error.add_note(
                f"ringdance: training was restored to its last commit {MOST_FAILURES} times in a row and "
                "failed each time. Giving up."
            )
            raise error
        if engine is None or engine.rank == 0:
            _log.warning(
                "ringdance: %s: %s. All ranks are going back to the last commit and restarting (attempt %d "
                "of at most %d without a new commit).",
                type(error).__name__, str(error).rstrip("."), self._count, MOST_FAILURES,
            )  # fmt: skip


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function whose first argument is a state. See the module docstring."""
    return run_fn(func, restart)


class ElasticIndices:
    """Divides the remaining samples of an epoch among the ranks.

    The indices of the dataset are shuffled with Python's ``random`` module, seeded with ``seed + epoch``.
    The first ``processed_num`` have already been processed. The remaining ones are padded to a multiple of
    the number of ranks, by repeating the first of them, and are distributed round-robin. All ranks compute
    the same order without communication.

    Args:
        length: Number of samples in the dataset.
        shuffle: If False, keep the order of the dataset.
        seed: Seed for shuffling, the same on all ranks.

    Attributes:
        epoch: Epoch set by ``set_epoch``.
        processed_num: Number of samples processed in this epoch, in total over all ranks.
        num_replicas, rank: Number of ranks, and rank of this process, as of the last ``reset``.
        remaining_indices: Indices that had not been processed at the last ``reset``.
        num_samples: Number of remaining samples per rank, with padding.
        total_size: Number of remaining samples in total over all ranks, with padding.
    """

    def __init__(self, length: int, shuffle: bool = True, seed: int = 0) -> None:
        self._length = length
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch from the beginning. Call this at the end of each epoch, not after a restart."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the epoch and its progress, and distribute the remaining samples again."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining samples among the current ranks."""
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        order = list(range(self._length))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Pad by repeating the indices from the start, several times if there are fewer samples than ranks.
        lengthened = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(lengthened)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


# The last error of a collective in a compiled function. Kept because frameworks preserve only its message.
_last: list[BaseException] = []
_before_commit: list[Callable[[], None]] = []


def before_commit(function: Callable[[], None]) -> None:
    """Register a function that waits until a framework has started the exchanges of its programs."""
    _before_commit.append(function)


def remember(error: BaseException) -> None:
    """Store an error raised by a collective in a compiled function, for ``run_translating``."""
    _last[:] = [error]


def run_translating(func: Callable[..., T], errors: Any) -> Callable[..., T]:
    """Wrap ``func`` like ``run``, for a framework that raises its own errors when a collective fails.

    Args:
        func: Function whose first parameter is a ``State``.
        errors: The framework's error class.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        try:
            return func(*args, **kwargs)
        except errors as error:
            raise next((ours for ours in _last if str(ours) and str(ours) in str(error)), error) from None

    return run(translated)
