"""The base class of the image and table loaders: threads prepare the batches of an epoch in advance."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ringdance.data.order import BatchPlan
from ringdance.errors import ArgumentError

_READS = 4  # reader threads; this many concurrent reads keep a network file system busy
Wait = Callable[[], list[Any]]
"""Waits until threads have prepared the batches of a part, and returns these batches."""


class Epoch:
    """An iteration over the rest of an epoch, with threads that prepare its batches in advance.

    Attributes:
        plan: Decides which samples each batch gets.
        pool: Threads that make batches.
        reads: Threads that only read.
        stop: Set when the batches being prepared are no longer wanted.
    """

    def __init__(self, loader: Batches, epoch: int, position: int) -> None:
        self._loader, self.plan, self.stop = loader, copy.copy(loader.plan), threading.Event()
        self.plan.set_epoch(epoch, position)
        self.pool = ThreadPoolExecutor(loader.threads, loader.thread_name)
        self.reads = ThreadPoolExecutor(_READS, f"{loader.thread_name}-read")
        self._pending: deque[Wait] = deque()
        self._parts = loader.parts(self)
        self.begun: Future[None] | None = None
        self.process = os.getpid()
        self.planned = False  # True once all remaining work has been submitted to the threads

    def fill(self) -> None:
        """Submit work until the limit on batches prepared ahead is reached."""
        while len(self._pending) < self._loader.ahead and not self.planned:
            if part := next(self._parts, None):
                self._pending.append(self._loader.prepare(self, part))
            else:
                self.planned = True

    def next(self) -> list[Any]:
        """Wait for the next batches, and submit more work. Returns [] at the end, or if ``stop`` is set."""
        if self.process != os.getpid():
            raise ArgumentError("A forked process cannot continue this iteration. Start a new one there.")
        if self.begun:
            self.begun.result()
            self.begun = None
        self.fill()
        batches = self._pending.popleft()() if self._pending else []
        if self.stop.is_set():
            return []
        self.fill()
        return batches

    def end(self) -> None:
        """Stop the threads. Each finishes its current task."""
        self.stop.set()
        if self.process == os.getpid():  # after a fork, the threads exist only in the parent
            self.pool.shutdown()
            self.reads.shutdown()


class Batches:
    """Base class of loaders. Follows a batch plan, and converts batches for a framework.

    If epochs are shuffled, the next epoch's first batches are prepared while training uses the last batches
    of the current epoch, and while a model is evaluated between epochs.

    Args:
        plan: Decides which samples each batch gets.
        threads: Number of threads that prepare batches.
        ahead: Number of batches, or groups of batches, to prepare in advance.

    Attributes:
        plan: Decides which samples each batch gets.
        convert: Called with each batch of NumPy arrays. Iteration yields its results.
    """

    thread_name = "ringdance-data"

    def __init__(self, plan: BatchPlan, threads: int = 1, ahead: int = 1) -> None:
        self.plan, self.threads, self.ahead = plan, threads, ahead
        self.convert: Callable[[Any], Any] = lambda batch: batch
        self._epochs: list[Epoch] = []  # iterations in progress
        self._following: Epoch | None = None
        self._follow = plan.shuffle

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Drops the next epoch's batches, because they were prepared with the old value."""
        super().__setattr__(name, value)
        if not name.startswith("_") and getattr(self, "_following", None):
            self._drop_following()

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Set the next iteration's epoch, and the position in the epoch's order at which to start.

        Args:
            epoch: Number of the epoch, from 0.
            position: The ``position`` of the last batch consumed, on any number of ranks.

        Raises:
            ArgumentError: The epoch has fewer than ``position`` samples.
        """
        self.plan.set_epoch(epoch, position)

    def position_after(self, batches: int) -> int:
        """Return the ``position`` that is reached ``batches`` batches after ``set_epoch``."""
        return self.plan.position_after(batches)

    def __len__(self) -> int:
        """Return the number of batches left in the epoch. It is the same on all ranks."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch. If the loop is left early, the threads also stop."""
        return map(self.convert, self.batches())

    def parts(self, epoch: Epoch) -> Iterator[Any]:
        """Yield the parts of the epoch. Each part is prepared as a unit."""
        return epoch.plan.batches()

    def prepare(self, epoch: Epoch, part: Any) -> Wait:
        """Submit a part of the epoch to the threads.

        Returns:
            A function that waits for the part's batches. It returns [] if ``epoch`` was stopped.
        """
        raise NotImplementedError

    def batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch as NumPy arrays."""
        epoch = self._begun()
        self._epochs.append(epoch)
        ended = False
        try:
            while batches := epoch.next():
                if epoch.planned and self._follow and self._following is None:
                    self._following = Epoch(self, epoch.plan.epoch + 1, 0)
                    self._following.begun = epoch.pool.submit(self._following.fill)
                while batches:
                    yield batches.pop(0)  # drops the list's reference, so only the caller holds the batch
                    if epoch.stop.is_set():
                        return
            ended = True
        except RuntimeError:  # from submit, if another thread has called close() in the meantime
            if not epoch.stop.is_set():
                raise
        finally:
            epoch.end()
            self._epochs.remove(epoch)
            if not ended:  # other iterations may continue, so stop only the next epoch
                self._drop_following()

    def _begun(self) -> Epoch:
        """Return the epoch to iterate over. Uses the epoch prepared in advance if it is the right one."""
        wanted = self.plan.epoch, self.plan.position
        following, self._following = self._following, None
        if following and following.process == os.getpid():
            if (following.plan.epoch, following.plan.position) == wanted:
                return following
            self._follow = False  # the caller does not simply continue with the next epoch
            following.end()
        return Epoch(self, *wanted)

    def leave(self) -> None:
        """Stop the threads of all iterations in progress. Each finishes its current task."""
        for epoch in list(self._epochs):
            epoch.end()

    def close(self) -> None:
        """Stop all threads, including those that prepare the next epoch."""
        self.leave()
        self._drop_following()

    def _drop_following(self) -> None:
        """Stop the threads that prepare the next epoch."""
        following, self._following = self._following, None
        if following:
            following.end()
