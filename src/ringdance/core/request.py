"""Requests, which are submitted to the engine, and the ``Work`` objects that the engine returns."""

from __future__ import annotations

import enum
import hashlib
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


# A state machine: each next() advances it as far as possible without blocking.
Steps = Generator[None, None, Any]
TUNE_NAME = "ringdance.tune"
"""Name of the request by which the ranks exchange measurements for tuning. No thread waits for it."""


class Collective(enum.IntEnum):
    """The kind of operation that a request performs."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_SET = 7
    REMOVE_SET = 8
    TUNE = 9


class ReduceOp(enum.IntEnum):
    """Operation that combines the values of several ranks. The numbers are the same as in Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True, slots=True)
class Description:
    """The properties of a request that all ranks must agree on before it is executed.

    ``shapes`` holds one shape per tensor of the request. If the tensors' first dimension may differ between
    ranks (allgather, alltoall), shapes omit this dimension. Values that differ from call to call (the first
    dimension, splits) travel with the exchange.
    ``pattern``: For gradients: which variables have no gradient, or a gradient that consists of rows. See
    ``pattern_of`` in ``training/gradients/lists.py``.
    ``device``: Kind of device that holds a framework's own tensors, "" for NumPy views. See
    ``DeviceExchange``.
    """

    kind: Collective
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    operation: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    detail: tuple[int, ...] = ()
    pattern: str = ""
    device: str = ""

    def digest(self) -> int:
        """Return a 32-bit digest. Equal descriptions have the same digest on all ranks."""
        return _digest(self)


@lru_cache(maxsize=4096)
def _digest(description: Description) -> int:
    return int.from_bytes(hashlib.blake2b(repr(description).encode(), digest_size=4).digest(), "little")


@dataclass(slots=True)
class Request:
    """One collective operation on one or more tensors. A group of tensors succeeds or fails as a whole.

    Args:
        description: The properties that must be equal on all ranks.
        inputs: C-contiguous NumPy views of the caller's memory, not copied, or a framework's tensors if the
            description has a ``device``. They must not change until the work is done.
        outputs: Views of the caller's memory that receive the results (for an in-place operation, the
            inputs). If None, the engine allocates them, 64-byte aligned.
        name: Key that matches this request with the other ranks' requests. If None, the request is matched
            by its position in the order of submission.
        set_id: Process set, or 0 for all ranks.
        splits: For alltoall only: number of rows for each member (int64), for each tensor in the group.
        ready: For tensors on a device: the event after which the inputs hold the data to send.
    """

    description: Description
    inputs: tuple[np.ndarray[Any, Any], ...] = ()
    outputs: tuple[np.ndarray[Any, Any], ...] | None = None
    name: str | None = None
    set_id: int = 0
    splits: tuple[np.ndarray[Any, Any], ...] | None = None
    ready: Any = None


class DeviceResults(list[Any]):
    """Results of a request, valid on the device after ``event``.

    ``received``: For alltoall only: number of rows received from each member, for each tensor.
    """

    event: Any = None
    received: list[list[int]] | None = None


class Work:
    """A submitted request. Shows when the request is done, and holds its result.

    Attributes:
        request: The submitted request.
        name: Name of the request, generated if it has none (``allreduce.noname.7``).
        result: Once done, a list of NumPy arrays, one per tensor. For tensors on a device,
            ``DeviceResults``. For join and process set collectives, an int.
        received_splits: For alltoall only: number of rows received from each member (int64).
        error: Exception that ``wait`` raises, if the request failed.
        complete: The value that ``done()`` would return, without the cost of a call.
        order: Number of an unnamed request in its process set, otherwise -1.
        refusal: Reason why this rank's own call was refused (``Engine.refuse``), or None.
        announced: Round in which the request was sent to the other members as a cache miss, otherwise 0.
        submitted: Time of submission (``time.monotonic()``).
        waited_since: Time when a thread first waited for the request, on the same clock. 0.0 if none has.
        thread: Identifier of the thread that is waiting for the request. Until a thread waits, this is the
            thread that submitted it.
    """

    # Slots, not an instance dictionary with defaults on the class: when several threads filled in such
    # dictionaries in varying order, CPython 3.11.7 crashed (dictresize of a key-sharing table).
    __slots__ = (
        "_on_done", "_waiter", "announced", "complete", "error", "name", "order", "received_splits",
        "refusal", "request", "result", "submitted", "thread", "wait_on", "waited_since",
    )  # fmt: skip

    def __init__(self, request: Request, name: str, wait_on: Callable[[Work, float | None], None]) -> None:
        self.request = request
        self.name = name
        self.wait_on = wait_on
        self.submitted = monotonic()
        self.waited_since = 0.0
        self.thread = get_ident()
        self.order = -1
        self.announced = 0
        self.result: Any = None
        self.received_splits: list[np.ndarray[Any, Any]] | None = None
        self.error: BaseException | None = None
        self.refusal: str | None = None
        self.complete = False
        self._waiter: threading.Event | None = None
        self._on_done: Callable[[], None] | None = None

    def done(self) -> bool:
        """Return True if the request is complete or has failed. Never blocks."""
        return self.complete

    def wait(self, timeout: float | None = None) -> Any:
        """Block until done and return ``result``.

        Raises:
            CollectiveError: The collective failed. The subclass says how.
            TimeoutError: ``timeout`` seconds have passed. The request remains in progress.
        """
        if not self.complete:
            self.thread = get_ident()
            self.wait_on(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Mark the request as done. Only the engine calls this."""
        self.result = result
        self.error = error
        self.complete = True
        if self._on_done is not None:
            self._on_done()
            self._on_done = None
        if self._waiter is not None:
            self._waiter.set()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call()`` when the request is done: now, or in the engine step that completes the request.

        ``call`` may run twice, on two threads at the same time. It must not raise or wait for a Work.
        """
        self._on_done = call
        if self.complete:
            call()

    def waiter(self) -> threading.Event:
        """Return an event that is set when the request is done. Only the engine calls this."""
        if self._waiter is None:
            self._waiter = threading.Event()
        if self.complete:
            self._waiter.set()
        return self._waiter
