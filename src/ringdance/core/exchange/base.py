"""The interfaces of exchanges, for NumPy views and for tensors on a device, and shared helpers."""

from __future__ import annotations

import abc
import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.exchange.chunks import segments
from ringdance.core.recorder import Recorder
from ringdance.core.request import Description, Request
from ringdance.core.request import Steps as Steps

Array = np.ndarray[Any, Any]
_char = ctypes.c_char
_COPY_BYTES = 16 << 20


class Context:
    """State that the exchanges of one engine share.

    Attributes:
        achieved: Counter that any progress increments. The progress engine sleeps while it is unchanged.
        in_transit: Number of exchanges that are waiting for other hosts. Threads sleep only briefly while
            there are any, because MPI moves data only during calls.
        recorder: Receives a record of each chunk while ``recorder.words[Word.DETAIL]`` is set.
        make_device: For each kind of device, makes the exchange for tensors on it. Set by the bindings.
        on_thread: Runs a call that may block, without blocking the other process sets.
    """

    __slots__ = ("achieved", "in_transit", "make_device", "on_thread", "recorder")

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self.achieved = 0
        self.in_transit = 0
        self.make_device: dict[str, Callable[[Exchange, str], Steps]] = {}
        self.on_thread: Callable[[Callable[[], Any]], Steps] | None = None


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an uninitialized array that starts at a multiple of 64 bytes, as TensorFlow requires."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -ctypes.addressof(_char.from_buffer(raw)) % 64  # four times as fast as raw.ctypes.data
    return np.ndarray(shape, dtype, raw, start)


def as_bytes(array: Array) -> Array:
    """Return a flat uint8 view of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8)


def copy_range(
    views: Sequence[Array], bounds: Sequence[int], start: int, stop: int, buffer: Array, outward: bool
) -> None:
    """Copy bytes [start, stop) of the concatenated ``views`` to ``buffer``, or back if ``outward``."""
    if len(views) == 1:  # fast path, five times as fast
        if outward:
            views[0][start:stop] = buffer[: stop - start]
        else:
            buffer[: stop - start] = views[0][start:stop]
        return
    for segment in segments(bounds, start, stop, 0):
        part = views[segment.tensor][segment.start : segment.stop]
        if outward:
            part[...] = buffer[segment.at : segment.end]
        else:
            buffer[segment.at : segment.end] = part


class Exchange(abc.ABC):
    """The collectives on flat arrays, as state machines.

    All members run the same collectives in the same order. The caller must keep all arrays alive, and
    inputs unchanged, until the state machine has ended.

    Attributes:
        set_id: Process set of the members, named in records.
        devices: Exchanges for the members' tensors on devices, by kind of device.
        chunk_bytes: Chunk size, in bytes, of an all-reduce within a host, or 0 without chunks.
        most_chunk_bytes: Upper bound for changes of ``chunk_bytes``.
        wire_bytes: Number of bytes sent between hosts at a time, or 0 if nothing is sent between hosts.
        flat: True if all-reduces skip the stage within hosts, or None if there is only one stage.
    """

    set_id = 0
    chunk_bytes = wire_bytes = most_chunk_bytes = 0
    flat: bool | None = None

    def __init__(self, rank: int, size: int, context: Context) -> None:
        self.rank = rank
        self.size = size
        self.context = context
        self.devices: dict[str, DeviceExchange] = {}

    @abc.abstractmethod
    def set_chunks(self, chunk_bytes: int, wire_bytes: int) -> None:
        """Change the chunk sizes of all-reduces. All members must do so while nothing is in flight."""

    @abc.abstractmethod
    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        """Reduce flat ``inputs`` of one dtype over all members into ``outputs`` (may be the inputs)."""

    @abc.abstractmethod
    def stream(
        self, sends: Sequence[Array], lengths: Sequence[int], receives: Sequence[Sequence[Array] | None]
    ) -> Steps:
        """Let each member read the other members' rows of bytes.

        Args:
            sends: This member's row, as uint8 views.
            lengths: Length of each member's row, in bytes.
            receives: Views that receive each member's row. None for rows that are not wanted. A member never
                receives its own row.
        """

    @abc.abstractmethod
    def alltoall(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Steps:
        """Send ``sends[i]`` (uint8) to member i and receive ``receives[i]`` from it.

        ``longest``: Size in bytes of the largest part that any member sends to another.
        """

    @abc.abstractmethod
    def reducescatter(self, source: Array, rows: Sequence[int], output: Array, how: Reduction) -> Steps:
        """Reduce flat ``source``. Member i receives ``rows[i]`` elements of the result in ``output``."""

    def gather_words(self, words: Sequence[int]) -> Steps:
        """Return all members' ``words`` (int64). All members must pass the same number of words."""
        own = np.array(words, np.int64)
        table = np.empty((self.size, len(words)), np.int64)
        table[self.rank] = own
        rows: list[list[Array] | None] = [[table[rank].view(np.uint8)] for rank in range(self.size)]
        yield from self.stream([own.view(np.uint8)], [own.nbytes] * self.size, rows)
        return table.tolist()

    def gather_bytes(self, payload: bytes) -> Steps:
        """Return a list of all members' payloads, whose lengths may differ."""
        lengths = [row[0] for row in (yield from self.gather_words([len(payload)]))]
        payloads = [np.empty(length, np.uint8) for length in lengths]
        payloads[self.rank] = np.frombuffer(payload, np.uint8)
        yield from self.stream([payloads[self.rank]], lengths, [[view] for view in payloads])
        return [view.tobytes() for view in payloads]

    def broadcast_bytes(self, payload: bytes, root: int) -> Steps:
        """Return member ``root``'s ``payload``."""
        lengths = [
            row[0] for row in (yield from self.gather_words([len(payload) if self.rank == root else 0]))
        ]
        view = np.frombuffer(payload, np.uint8) if self.rank == root else np.empty(lengths[root], np.uint8)
        yield from self.broadcast([view], root)
        return view.tobytes()

    def broadcast(self, views: Sequence[Array], root: int) -> Steps:
        """Copy member ``root``'s uint8 ``views`` into the other members' views."""
        length = sum(view.nbytes for view in views)
        lengths = [length if rank == root else 0 for rank in range(self.size)]
        receives: list[Sequence[Array] | None] = [None] * self.size
        receives[root] = views
        yield from self.stream(views if self.rank == root else [], lengths, receives)

    def copy(self, source: Array, target: Array) -> Steps:
        """Copy an array locally, piece by piece, because filling 1 GB of new memory takes several seconds."""
        source, target = as_bytes(source), as_bytes(target)
        for start in range(0, source.size, _COPY_BYTES):
            if start:
                self.context.achieved += 1
                yield
            target[start : start + _COPY_BYTES] = source[start : start + _COPY_BYTES]

    def swap(self, send: Array, receive: Array, partner: int) -> Steps:
        """Exchange uint8 rows of equal length with ``partner``. All members swap at the same time."""
        receives: list[Sequence[Array] | None] = [None] * self.size
        receives[partner] = [receive]
        yield from self.stream([send], [send.nbytes] * self.size, receives)

    @staticmethod
    def bounds(views: Sequence[Array]) -> list[int]:
        """Return each view's start offset in the concatenation of the views, and the total length."""
        return [0, *accumulate([view.size for view in views])]


class DeviceExchange(Protocol):
    """A framework's own communicator for the tensors of one process set that stay on their device.

    Members agree on requests for such tensors as on all others, and all members execute them in the agreed
    order. What "done" means depends on the device: on a GPU, a Work is done when its exchange is enqueued.
    The stream that uses the results waits for ``DeviceResults.event``. The host does not wait.
    """

    def execute(self, pairs: Sequence[tuple[Description, Request | None]], members: Sequence[int]) -> Steps:
        """Run a batch and return ``DeviceResults`` for each request.

        Args:
            pairs: Descriptions and requests, in agreed order. The request is None if this rank has joined.
            members: The global ranks of the process set.
        """

    def check(self) -> None:
        """Raise an error if the communicator has detected one since the last call."""

    def in_flight(self) -> bool:
        """Return True if an exchange has been enqueued, so that its request is done, but is not complete."""

    def close(self, agreed: bool) -> None:
        """Free everything. Unless ``agreed``, abort operations in progress without waiting for them."""
