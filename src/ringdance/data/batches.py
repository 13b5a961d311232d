"""The base class of the image and table loaders. Threads prepare an epoch's batches in advance."""

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
        pool: Threads that prepare batches.
        reads: Threads that read files into the page cache.
        stop: Set when the batches being prepared are no longer needed.
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
        self.planned = False  # True once all remaining work is submitted to the threads

    def fill(self) -> None:
        """Submit work to the threads until ``ahead`` parts of the epoch are pending."""
        while len(self._pending) < self._loader.ahead and not self.planned:
            if part := next(self._parts, None):
                self._pending.append(self._loader.prepare(self, part))
            else:
                self.planned = True

    def next(self) -> list[Any]:
        """Wait for the next batches, and submit more work. Returns [] at the end or if ``stop`` is set."""
        if self.process != os.getpid():
            raise ArgumentError("A forked process cannot continue its parent's iteration. Start a new one.")
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
    """Base class of loaders, which prepare the batches of a plan and convert them for a framework.

    If epochs are shuffled, threads start to prepare the next epoch before the current one ends. They continue
    while the model is evaluated between epochs.

    Args:
        plan: Decides which samples each batch gets.
        threads: Number of threads that prepare batches.
        ahead: Number of batches, or groups of batches, to prepare in advance.

    Attributes:
        plan: Decides which samples each batch gets.
        convert: Called with each batch of NumPy arrays. Iteration yields what it returns.
    """

    thread_name = "ringdance-data"

    def __init__(self, plan: BatchPlan, threads: int = 1, ahead: int = 1) -> None:
        self.plan, self.threads, self.ahead = plan, threads, ahead
        self.convert: Callable[[Any], Any] = lambda batch: batch
        self._epochs: list[Epoch] = []  # epochs that are being iterated over
        self._following: Epoch | None = None
        self._follow = plan.shuffle

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Drops batches prepared for the next epoch, which may depend on the old value."""
        super().__setattr__(name, value)
        if not name.startswith("_") and getattr(self, "_following", None):
            self._drop_following()

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Set the epoch of the next iteration, and the position in that epoch at which to start.

        Args:
            epoch: Number of the epoch, from 0.
            position: The ``position`` of the last batch consumed, on any number of ranks.

        Raises:
            ArgumentError: The epoch has fewer than ``position`` samples.
        """
        self.plan.set_epoch(epoch, position)

    def position_after(self, batches: int) -> int:
        """Return the ``position`` after ``batches`` batches, starting where ``set_epoch`` did."""
        return self.plan.position_after(batches)

    def __len__(self) -> int:
        """Return the number of batches left in the epoch. It is the same on all ranks."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch. Stops the threads if the loop is left early."""
        return map(self.convert, self.batches())

    def parts(self, epoch: Epoch) -> Iterator[Any]:
        """Yield the parts of an epoch, to be passed to ``prepare``. By default, a part is one batch."""
        return epoch.plan.batches()

    def prepare(self, epoch: Epoch, part: Any) -> Wait:
        """Submit a part of the epoch to the threads.

        Returns:
            A function that waits for the part's batches and returns them. If the epoch has been stopped, the
            batches may be missing or incomplete.
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
        except RuntimeError:  # raised by submit() after another thread has called close()
            if not epoch.stop.is_set():
                raise
        finally:
            epoch.end()
            self._epochs.remove(epoch)
            if not ended:  # do not call close(), because other iterations may continue
                self._drop_following()

    def _begun(self) -> Epoch:
        """Return the epoch set by ``set_epoch``. Reuses the one prepared in advance if it matches."""
        wanted = self.plan.epoch, self.plan.position
        following, self._following = self._following, None
        if following and following.process == os.getpid():
            if (following.plan.epoch, following.plan.position) == wanted:
                return following
            self._follow = False  # the next epoch was prepared in vain, so do not prepare another
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
