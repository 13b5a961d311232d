"""torch's ``Work`` for calls to the backend "ringdance". It is complete when the engine's work is complete.

Note [Who waits]
A thread that calls ``wait`` on a work or on its future runs steps of the engine. DistributedDataParallel
waits for the futures of its buckets in C++, where the waiting thread cannot run these steps. Therefore, a
callback at the end of the backward pass, which torch runs before DistributedDataParallel's callback, waits
for the works of the pass. It waits in the order of the calls, which is the same on all ranks even if
callbacks of futures make further calls. Without spare cores, nothing is exchanged before the end of the pass
(``wants_overlap``). All other futures are completed by a separate thread, for callers that wait in C++.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdance.core.engine import Engine
from ringdance.core.recorder import StepMark
from ringdance.core.transfers import Transfer
from ringdance.torch import _private
from ringdance.torch.memory import Array
from ringdance.training import session
from ringdance.training.gradients.cores import wants_overlap

Finish = Callable[[list[Array]], None]

_NO_TIMEOUT = timedelta(0)
_PASSES = 64  # Maximum number of backward passes in progress, whether nested or in different threads.


class _Future(torch.futures.Future[Any]):
    """The future of a work, or of a callback chained to it. Waiting for it in Python completes it."""

    def __init__(self, work: GroupWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work.settle()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = _Future(self._work)

        def run(_: Any) -> None:
            try:
                following.set_result(callback(self))
            except BaseException as error:
                following.set_exception(error)

        super().then(run)
        return following


class GroupWork(dist.Work):
    """An asynchronous call of a process group.

    The engine completes the call. The outputs contain the results as soon as the engine's works are done,
    even if no thread waits for them. Until then, the engine keeps this object alive.

    Args:
        engine: The engine of this rank.
        set_id: The group's process set.
        works: Works or transfers of the engine.
        targets: Memory for the results. Results in other memory are copied to it.
        tensors: The call's outputs.
        finish: Called once with the results, in a step of the engine. May raise an error.
        timeout: Default timeout of ``wait`` in seconds. If it expires, this call and all later calls on the
            group fail on all ranks.
        expected: Number of elements expected from each rank (alltoall only).
    """

    def __init__(
        self, engine: Engine, set_id: int, works: Sequence[Any], targets: Sequence[Array],
        tensors: Sequence[Tensor], finish: Finish | None = None, timeout: float | None = None,
        expected: list[int] | None = None,
    ) -> None:
        super().__init__()
        self._engine, self._set_id, self._works, self._targets = engine, set_id, works, targets
        self._tensors, self._finish, self._timeout = list(tensors), finish, timeout
        self._expected, self._lock = expected, threading.Lock()
        self._complete = False
        self._seen = False  # True once the caller was told that the work is complete.
        self._error: BaseException | None = None
        self._future: _Future | None = None
        self._settled = False
        self.in_pass = False  # True if this work is awaited at the end of a backward pass.
        for work in works:
            work.when_done(self._one_done)

    @classmethod
    def of_all(cls, engine: Engine, set_id: int, calls: Sequence[GroupWork], timeout: float) -> GroupWork:
        """Return one work that is complete when all of these calls are complete."""
        works = [work for call in calls for work in call._works]
        tensors = [tensor for call in calls for tensor in call._tensors]

        def finish(_: list[Array]) -> None:
            for call in calls:
                call._deliver()
                if call._error is not None:
                    raise call._error

        return cls(engine, set_id, works, [], tensors, finish, timeout)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the outputs hold the results. Returns True.

        Raises:
            CollectiveError: The call failed on this rank or on all ranks.
            DistBackendError: The call did not complete within ``timeout``. You can wait for it again. If no
                ``timeout`` was passed, the call did not complete within the group's timeout. In this case,
                the group has failed on all ranks and, if it is the default group, so has the whole job.
        """
        seconds = timeout.total_seconds()
        try:
            for work in self._works:
                work.wait(seconds or self._timeout)
        except TimeoutError:
            self._give_up(seconds)
        except Exception as error:
            self._deliver(error)
        self._deliver()
        self._seen = True
        if self._error is not None:
            raise self._error
        return True

    def _give_up(self, given: float) -> None:
        """Raise DistBackendError if the caller passed a timeout (``given``). Otherwise, make the group fail.

        After the group's timeout, the request is still in flight and uses the caller's memory, and a late
        peer could match it with a later call. Therefore, later calls must fail, too.
        """
        who = f"rank {self._engine.rank} ({self._engine.identity.host})"
        text = (
            f"'{self._works[0].name}' did not complete on {who} within {given or self._timeout:g} s "
            "(timeout= of init_process_group or of the call)"
        )
        if given:
            raise dist.DistBackendError(f"{text}. The call is still running, so you can wait for it again.")
        what = "its group" if self._set_id else "the job"
        text = f"{text}, so {what} has failed. Run `ringdance explain` to see which ranks have not called it."
        error = dist.DistBackendError(text)
        self._deliver(error)
        if self._error is error:  # The call did not complete in the meantime.
            late = next((work for work in self._works if not work.done()), self._works[0])
            self._engine.give_up(self._set_id, getattr(late, "order", -1), text)

    def _one_done(self) -> None:
        if all(work.done() for work in self._works):
            self._deliver()

    def _deliver(self, error: BaseException | None = None) -> None:
        """Copy results to the outputs, or store the error. Repeated calls have no effect. Thread-safe."""
        with self._lock:
            if self._complete:
                return
            try:
                failed = [work.error for work in self._works if work.error is not None]
                if error := error or next(iter(failed), None):
                    raise error
                self._write_results()
            except Exception as raised:
                self._error = raised
            self._complete = True

    def _write_results(self) -> None:
        results = [array for work in self._works for array in work.result or ()]
        received = [row.tolist() for work in self._works for row in work.received_splits or ()]
        name = self._works[0].name if self._works else ""
        if self._expected is not None and received != [self._expected]:
            raise ValueError(
                f"{name}: rank {self._engine.rank} received {received[0]} elements (or bytes) per source, "
                f"but its outputs hold {self._expected}. Make the output sizes match."
            )
        for result, target in zip(results, self._targets, strict=False):
            if result is not target:
                if result.size != target.size or result.dtype != target.dtype:
                    raise ValueError(
                        f"{name}: the ranks sent tensors of different sizes or dtypes. Use the same size and "
                        "dtype on all ranks."
                    )
                target[...] = result.reshape(target.shape)
        if self._finish is not None:
            self._finish(results)

    def settle(self) -> None:
        """Wait for the call, and complete its future with the outputs or the error."""
        with contextlib.suppress(Exception):
            self.wait()
        with self._lock:
            future = None if self._settled else self._future
            self._settled = future is not None
        if future is None:
            return
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)

    def is_completed(self) -> bool:
        try:
            if not self._complete and all(work.done() for work in self._works):
                self._deliver()  # Needed for transfers, or if another thread is about to deliver.
        except Exception as error:  # Raised if a transfer failed.
            self._deliver(error)
        if not self._complete and self.in_pass:
            self._engine.flush(self._set_id)
        self._seen |= self._complete
        return self._complete

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        return int(self._works[0].source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future that gets the outputs or, if the call fails, the error."""
        if self._future is None:
            self._future = _Future(self)
            # Callbacks may make calls, which match by order. Therefore, the order of callbacks must not
            # depend on when the engine completes each work. They run at the end of the pass, in a thread or,
            # if this rank has already waited for the work, immediately.
            if self._seen:
                self.settle()
            elif not self._works or isinstance(self._works[0], Transfer):  # Not matched by order.
                threading.Thread(target=self.settle, name="ringdance transfer", daemon=True).start()
            elif not self.in_pass:
                _waiters[self._set_id].put(self)
        return self._future


class _Waiter:
    """A thread that waits for works in order, and completes their futures."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[GroupWork] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, work: GroupWork) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # Not started yet, or lost in a fork.
                self._thread = threading.Thread(target=self._run, name="ringdance futures", daemon=True)
                self._thread.start()
        self._works.put(work)

    def _run(self) -> None:
        while True:
            self._works.get().settle()


# One per process set, so that process sets do not wait for each other.
_waiters: defaultdict[int, _Waiter] = defaultdict(_Waiter)
_passes: dict[int, list[GroupWork]] = {}  # The works to await at the end of each backward pass.


@lru_cache(maxsize=1)
def _overlaps(engine: Engine) -> bool:
    return wants_overlap(engine, torch.get_num_threads())


def starts_now(engine: Engine) -> bool:
    """Return True if the engine thread should start an asynchronous call made now. See Note [Who waits]."""
    return not _private.end_is_ahead() or _overlaps(engine)


def wait_at_end(work: GroupWork) -> None:
    """If this thread is running a backward pass, make the end of the pass wait for ``work``."""
    if not _private.end_is_ahead():
        return
    work.in_pass, task = True, _private.graph_task()
    if task in _passes:
        _passes[task].append(work)
        return
    while len(_passes) > _PASSES:  # Drop failed passes, whose end callbacks never run.
        _passes.pop(min(_passes), None)
    _passes[task] = [work]
    _private.queue_callback(lambda: _wait_for_pass(task))


def _wait_for_pass(task: int) -> None:
    works = _passes.pop(task, [])
    for work in works:
        work.settle()
    session.mark_step(StepMark.GRADIENTS)
    for work in works:
        if (error := work.exception()) is not None:
            raise error
