"""What the calls of the backend "ringdance" return: torch's ``Work``, done when the engine's is.

Note [Who waits]
A thread that calls ``wait`` of a work or of its future steps the engine. DistributedDataParallel waits for
the futures of its buckets in C++, where no thread of ours can help. So the works of a backward pass are
waited for at its end, by a callback that torch runs before that of DistributedDataParallel: in their order,
the same on all ranks, also if callbacks of futures make calls of their own. Without spare cores nothing is
exchanged before (``wants_overlap``). Other futures are completed by a thread, for those who wait in C++.
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

from ringdance import session
from ringdance.core.engine import Engine
from ringdance.core.recorder import StepMark
from ringdance.torch import _private
from ringdance.torch.memory import Array
from ringdance.training.gradients.options import wants_overlap

_NO_TIMEOUT = timedelta(0)
_PASSES = 64  # backward passes under way, in threads and in one another


class _Future(torch.futures.Future[Any]):
    """The future of a work, or of a callback after it: who waits in Python completes it."""

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
    """A call of a process group that is under way.

    Args:
        engine: of this rank.
        works: the engine's works, and transfers.
        targets: where results go; a result that lies elsewhere is copied there.
        tensors: the call's outputs.
        finish: called once with the results.
        timeout: seconds that ``wait`` waits.
        expected: of an alltoall, the sizes of what must come from each rank.
    """

    def __init__(
        self, engine: Engine, works: Sequence[Any], targets: Sequence[Array], tensors: Sequence[Tensor],
        finish: Callable[[list[Array]], None] | None = None, timeout: float | None = None,
        expected: list[int] | None = None,
    ) -> None:
        super().__init__()
        self._engine, self._works, self._targets = engine, works, targets
        self._tensors, self._finish, self._timeout = list(tensors), finish, timeout
        self._expected, self._lock = expected, threading.Lock()
        self._complete = False
        self._error: BaseException | None = None
        self._future: _Future | None = None
        self._settled = False
        self.in_pass = False  # waited for at the end of a backward pass

    @classmethod
    def of_all(cls, engine: Engine, calls: Sequence[GroupWork]) -> GroupWork:
        """Return one for several."""
        works = [work for call in calls for work in call._works]
        tensors = [tensor for call in calls for tensor in call._tensors]

        def finish(_: list[Array]) -> None:
            for call in calls:
                call._deliver()

        return cls(engine, works, [], tensors, finish)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the outputs hold the results; return True.

        Raises:
            CollectiveError: the call has failed, on this rank or all.
            DistBackendError: it took longer than the timeout of the call or of its group.
        """
        seconds = timeout.total_seconds() or self._timeout
        try:
            for work in self._works:
                work.wait(seconds)
            self._deliver()
        except TimeoutError as error:
            name = self._works[0].name
            raise dist.DistBackendError(
                f"'{name}' was not complete on rank {self._engine.rank} ({self._engine.identity.host}) after "
                f"{seconds:g} s (timeout= of init_process_group or of the call): see which ranks have not "
                "called it with `ringdance explain`."
            ) from error
        except BaseException as error:
            self._error = error
            raise
        return True

    def _deliver(self) -> None:
        with self._lock:
            if self._complete:
                return
            results = [array for work in self._works for array in work.result or ()]
            received = [row.tolist() for work in self._works for row in work.received_splits or ()]
            if self._expected is not None and received != [self._expected]:
                raise ValueError(
                    f"{self._works[0].name}: the ranks have sent {received[0]} elements (or bytes) to rank "
                    f"{self._engine.rank}, and its outputs are for {self._expected}."
                )
            for result, target in zip(results, self._targets, strict=False):
                if result is not target:
                    if result.size != target.size or result.dtype != target.dtype:
                        name = self._works[0].name
                        raise ValueError(f"{name}: ranks have sent tensors of different sizes or types.")
                    target[...] = result.reshape(target.shape)
            if self._finish is not None:
                self._finish(results)
            self._complete = True

    def settle(self) -> None:
        """Wait, and complete the future, in an error too."""
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
        if not all(work.done() for work in self._works):
            if self.in_pass:
                self._engine.flush(self._works[0].request.set_id)
            return False
        with contextlib.suppress(Exception):
            self.wait()
        return True

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
        """Return a future of the outputs; it has the error if the call has failed."""
        if self._future is None:
            self._future = _Future(self)
            if self._complete:
                self.settle()
            elif not self.in_pass:
                _waiters[getattr(self._works[0].request, "set_id", 0) if self._works else 0].put(self)
        return self._future


class _Waiter:
    """A thread that waits for works in their order, and completes their futures."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[GroupWork] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, work: GroupWork) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # or after a fork
                self._thread = threading.Thread(target=self._run, name="ringdance futures", daemon=True)
                self._thread.start()
        self._works.put(work)

    def _run(self) -> None:
        while True:
            self._works.get().settle()


_waiters: defaultdict[int, _Waiter] = defaultdict(_Waiter)  # by process set: groups do not wait for others
_passes: dict[int, list[GroupWork]] = {}  # by backward pass, what is waited for at its end


@lru_cache(maxsize=1)
def _overlaps(engine: Engine) -> bool:
    return wants_overlap(engine, torch.get_num_threads())


def starts_now(engine: Engine) -> bool:
    """Return whether the engine thread shall start an asynchronous call made now: Note [Who waits]."""
    return not _private.end_is_ahead() or _overlaps(engine)


def wait_at_end(work: GroupWork) -> None:
    """Wait for a work at the end of the backward pass that this thread works on, if it does."""
    if not _private.end_is_ahead():
        return
    work.in_pass, task = True, _private.graph_task()
    if task in _passes:
        _passes[task].append(work)
        return
    while len(_passes) > _PASSES:  # of passes that raised: it is never called back at their end
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
