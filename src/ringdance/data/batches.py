"""What loaders of images and of tables share: epochs whose batches threads prepare ahead."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ringdance.data.order import Plan
from ringdance.errors import ArgumentError

_READS = 4  # threads: as many reads at once keep a network disk busy
Wait = Callable[[], list[Any]]
"""Waits for what threads prepare; returns the batches."""


class Epoch:
    """The rest of an epoch, prepared ahead by threads of its own.

    Attributes:
        plan: which samples come in which batch.
        pool: its threads that make batches.
        reads: its threads that only read.
        stop: set when what they prepare is not wanted any more.
    """

    def __init__(self, loader: Batches, epoch: int, position: int) -> None:
        self._loader, self.plan, self.stop = loader, copy.copy(loader.plan), threading.Event()
        self.plan.set_epoch(epoch, position)
        self.pool = ThreadPoolExecutor(loader.threads, loader.thread_name)
        self.reads = ThreadPoolExecutor(_READS, f"{loader.thread_name}-read")
        self._pending: deque[Wait] = deque()
        self._parts: Iterator[Any] | None = None
        self.begun: Future[None] | None = None
        self.process = os.getpid()
        self.planned = False  # whether all that is left has been given to the threads

    def fill(self) -> None:
        """Give the threads as much as may be ahead."""
        if self._parts is None:
            self._parts = self._loader.parts(self)
        while len(self._pending) < self._loader.ahead and not self.planned:
            if part := next(self._parts, None):
                self._pending.append(self._loader.prepare(self, part))
            else:
                self.planned = True

    def next(self) -> list[Any]:
        """Wait for the next batches and go on; return [] at the end."""
        if self.process != os.getpid():
            raise ArgumentError("A forked process cannot go on with this iteration: begin another one there.")
        if self.begun:
            self.begun.result()
            self.begun = None
        self.fill()
        found = self._pending.popleft()() if self._pending else []
        if self.stop.is_set():
            return []
        self.fill()
        return found

    def end(self) -> None:
        """End the threads; each finishes what it is at."""
        self.stop.set()
        if self.process == os.getpid():  # not after a fork: the threads are those of the parent
            self.pool.shutdown()
            self.reads.shutdown()


class Batches:
    """What loaders share: the plan of the epochs, and a conversion of batches for a framework.

    Where an epoch has an order of its own, the first batches of the next one are prepared while the last
    ones of this one are used, and while a model is evaluated in between.

    Args:
        plan: which samples come in which batch.
        threads: that prepare batches.
        ahead: batches, or groups of them, that are prepared ahead.

    Attributes:
        plan: the same.
        convert: what makes of a batch of NumPy arrays what is yielded.
    """

    thread_name = "ringdance-data"

    def __init__(self, plan: Plan, threads: int = 1, ahead: int = 1) -> None:
        self.plan, self.threads, self.ahead = plan, threads, ahead
        self.convert: Callable[[Any], Any] = lambda batch: batch
        self._epochs: list[Epoch] = []  # under way
        self._following: Epoch | None = None
        self._follow = plan.shuffle

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; what was prepared of the next epoch without it is dropped."""
        super().__setattr__(name, value)
        if not name.startswith("_") and getattr(self, "_following", None):
            self._drop_following()

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose the epoch of the next iteration, and after how many samples of its order it begins.

        Args:
            epoch: its number, from 0.
            position: the ``position`` of the last batch that was consumed, with any number of ranks.

        Raises:
            ArgumentError: the epoch has fewer samples.
        """
        self.plan.set_epoch(epoch, position)

    def position_after(self, batches: int) -> int:
        """Return the ``position`` of the batch after which so many have come since ``set_epoch``."""
        return self.plan.position_after(batches)

    def __len__(self) -> int:
        """Return the number of batches left in the epoch, equal on all ranks."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch; threads end with it, also if it is left early."""
        return map(self.convert, self.batches())

    def parts(self, epoch: Epoch) -> Iterator[Any]:
        """Yield what is prepared as a whole."""
        return epoch.plan.batches()

    def prepare(self, epoch: Epoch, part: Any) -> Wait:
        """Give the threads such a part; return what waits for its batches, [] where `epoch` was stopped."""
        raise NotImplementedError

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch as NumPy arrays."""
        epoch = self._begun()
        self._epochs.append(epoch)
        ended = False
        try:
            while found := epoch.next():
                if epoch.planned and self._follow and self._following is None:
                    self._following = Epoch(self, epoch.plan.epoch + 1, 0)
                    self._following.begun = epoch.pool.submit(self._following.fill)
                while found:
                    yield found.pop(0)  # its memory is the caller's alone
                    if epoch.stop.is_set():
                        return
            ended = True
        except RuntimeError:  # of submit: another thread has called close() meanwhile
            if not epoch.stop.is_set():
                raise
        finally:
            epoch.end()
            self._epochs.remove(epoch)
            if not ended:  # other iterations may go on
                self._drop_following()

    def _begun(self) -> Epoch:
        """Return the epoch that is set: what was prepared ahead, if it is that one."""
        wanted = self.plan.epoch, self.plan.position
        following, self._following = self._following, None
        if following and following.process == os.getpid():
            if (following.plan.epoch, following.plan.position) == wanted:
                return following
            self._follow = False  # the caller has another sequence of epochs
            following.end()
        return Epoch(self, *wanted)

    def leave(self) -> None:
        """End the threads of all iterations that are under way; each finishes what it is at."""
        for epoch in list(self._epochs):
            epoch.end()

    def close(self) -> None:
        """End all threads, also those that prepare the next epoch."""
        self.leave()
        self._drop_following()

    def _drop_following(self) -> None:
        """End the threads that prepare the next epoch."""
        following, self._following = self._following, None
        if following:
            following.end()
