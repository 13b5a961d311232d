"""What is submitted to the engine, and what the caller holds in return."""

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


# A state machine: each next() does what can be done without waiting.
Steps = Generator[None, None, Any]
TUNE_NAME = "ringdance.tune"
"""Name of the request by which the ranks exchange what they have measured; no thread waits for it."""


class Collective(enum.IntEnum):
    """What a request asks for."""

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
    """How values of several ranks become one; numbered as in Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True, slots=True)
class Description:
    """What all ranks must agree on before a request is executed.

    ``shapes`` holds one shape for each tensor of the request; for collectives whose first
    dimension may differ between ranks (allgather, alltoall) only the rest of it.
    What differs from call to call (that dimension, splits) travels with the exchange.
    ``pattern``: of gradients, which variables have none or only rows, see ``options.pattern_of``.
    ``device``: kind of device of a framework's own tensors, "" for NumPy views: see ``exchange.device``.
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
        """Return a 32-bit number, the same on all ranks for equal descriptions."""
        return _digest(self)


@lru_cache(maxsize=4096)
def _digest(description: Description) -> int:
    return int.from_bytes(hashlib.blake2b(repr(description).encode(), digest_size=4).digest(), "little")


@dataclass(slots=True)
class Request:
    """One collective operation on one or more tensors (several: a group, all or nothing).

    Args:
        description: what must be equal on all ranks.
        inputs: C-contiguous NumPy views of the caller's memory, not copied; tensors of a framework if the
            description has a ``device``. They must not change until the work is done.
        outputs: where results go, views of the caller's memory (the input's own for an
            operation in place); ``None`` lets the engine allocate, 64-byte aligned.
        name: the key that matches this request with those of the other ranks; ``None``
            matches by order of submission.
        set_id: the process set, 0 for all ranks.
        splits: alltoall only, rows for each member, int64, for each tensor of the group.
        ready: on a device, the event after which inputs hold what is to be sent.
    """

    description: Description
    inputs: tuple[np.ndarray[Any, Any], ...] = ()
    outputs: tuple[np.ndarray[Any, Any], ...] | None = None
    name: str | None = None
    set_id: int = 0
    splits: tuple[np.ndarray[Any, Any], ...] | None = None
    ready: Any = None


class Work:
    """Returned by ``Engine.submit``: shows when a request is done and holds its result.

    Attributes:
        request: what was submitted.
        name: the name it runs under (``allreduce.noname.7`` for an unnamed one).
        result: list of NumPy arrays, one for each tensor, once done; of tensors on a device,
            ``device.DeviceResults``. For join and process set collectives: an int.
        received_splits: alltoall only, rows received from each member, int64.
        error: the exception that ``wait`` raises, if it failed.
        complete: what ``done()`` returns, without a call.
        order: number of an unnamed request in its process set, else -1.
        refusal: why this rank's own call was refused, if it was (``Engine.refuse``).
        announced: the round in which it was sent to the other members as a cache miss, else 0.
        submitted: when, in seconds of ``time.monotonic``.
        waited_since: when a thread first waited for it, likewise; 0.0 if none has.
        thread: identifier of the thread that waits for it or, as long as none does, that submitted it.
    """

    # Slots, not an instance dictionary with defaults on the class: filled in by several threads in varying
    # order, such dictionaries crashed CPython 3.11.7 (dictresize of a key-sharing table).
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
        """Return whether the request is complete or has failed. Never blocks."""
        return self.complete

    def wait(self, timeout: float | None = None) -> Any:
        """Block until done and return ``result``.

        Raises:
            CollectiveError: the collective failed (its subclass says how).
            TimeoutError: ``timeout`` seconds passed; the request goes on.
        """
        if not self.complete:
            self.thread = get_ident()
            self.wait_on(self, timeout)
        if self.error is not None:
            raise self.error
        return self.result

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Mark as done (engine only)."""
        self.result = result
        self.error = error
        self.complete = True
        if self._on_done is not None:
            self._on_done()
            self._on_done = None
        if self._waiter is not None:
            self._waiter.set()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call()`` when this is done: now, or in the engine step that completes it.

        It may be called twice, from two threads at once. It must neither raise nor wait for a Work.
        """
        self._on_done = call
        if self.complete:
            call()

    def waiter(self) -> threading.Event:
        """Return an event that is set when done (engine only)."""
        if self._waiter is None:
            self._waiter = threading.Event()
        if self.complete:
            self._waiter.set()
        return self._waiter
