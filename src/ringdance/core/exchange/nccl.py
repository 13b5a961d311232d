"""Exchange GPU memory with NCCL, for frameworks that provide addresses instead of tensors.

The ranks agree on requests as usual. The tensors of a request are described by ``DeviceBuffer`` objects.
The tensors of a request with the same dtype must be adjacent in memory, so that NCCL needs only one call.
All members' tensors must have the same shapes, in all collectives. Unlike other exchanges, this exchange
ignores ``prescale`` and ``postscale``: the framework's program applies them when it packs the tensors.

Note [Streams of an exchange]
A stream is a queue of work on a GPU. The framework computes on its own stream, and each exchange has another
stream. When a request is submitted, an event is recorded on the framework's stream (``Request.ready``), and
the stream of the exchange waits for it. After the exchange has been enqueued, another event is recorded there
(``DeviceResults.event``), and the framework's stream waits for this event. The host never waits for the GPU,
and the framework's stream can run other work between the two events.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdance.core.exchange.arithmetic import dtype_named
from ringdance.core.exchange.base import Exchange, Steps
from ringdance.core.request import Collective, Description, DeviceResults, ReduceOp, Request
from ringdance.core.transport.nccl import TYPES, Nccl
from ringdance.errors import ArgumentError, RankLostError, ShutDownError

DEVICE = "gpu"  # ``Description.device`` of requests for this exchange.
REDUCTIONS = (Collective.ALLREDUCE, Collective.REDUCESCATTER)

nccl = Nccl()
_device: list[int] = []  # GPU of the requests that this rank has submitted, if there are any.
_ALIGNMENT = 256  # bytes
_TIMEOUT_S = 600.0  # for an exchange that all ranks have enqueued


def exchanges(kind: Collective, operation: ReduceOp, scales: tuple[float, float], dtype: str) -> bool:
    """Return True if NCCL gives the same results as the engine.

    NCCL does not average integers exactly, and may drop NaN in Min and Max.
    """
    if kind not in REDUCTIONS:
        return True
    if dtype.startswith(("float", "bfloat")):
        return operation in (ReduceOp.SUM, ReduceOp.AVERAGE)
    return dtype in TYPES and operation is ReduceOp.SUM and scales == (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """A tensor in the memory of a GPU, which ``owner`` or the framework's program keeps alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    owner: Any = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


def buffers_at(
    addresses: Sequence[int], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]],
    owner: Any = None,
) -> tuple[DeviceBuffer, ...]:
    """Return tensors of which those with the same dtype are adjacent in memory.

    Args:
        addresses: Start of the tensors of each dtype, in the order in which the dtypes first occur.
        shapes: Shape of each tensor.
        dtypes: Dtype of each tensor.
        owner: Keeps the memory alive.
    """
    buffers, free = [], dict(zip(dict.fromkeys(dtypes), addresses, strict=True))
    for dtype, shape in zip(dtypes, shapes, strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        buffers.append(DeviceBuffer(free[dtype], shape, dtype, nbytes, owner))
        free[dtype] += nbytes
    return tuple(buffers)


def forget_device() -> None:
    """Let this rank use another GPU, because it has joined another job."""
    _device.clear()


def check_device(address: int) -> None:
    """Note this rank's GPU. Raises ArgumentError if it has already exchanged tensors on another GPU."""
    device = nccl.device_of(address)
    if _device and device != _device[0]:
        raise ArgumentError(
            f"This rank has exchanged tensors on GPU {_device[0]}, and cannot use GPU {device} as well. Use "
            "one GPU per rank."
        )
    _device[:] = [device]


def ready(stream: int) -> Any:
    """Return an event that occurs once the framework has computed what its stream computes now."""
    return nccl.stream_at(stream).record()


def wait(stream: int, results: DeviceResults) -> None:
    """Make a framework's stream wait for the results of a request."""
    nccl.stream_at(stream).wait(results.event)


class NcclExchange:
    """The ``DeviceExchange`` of a process set. Creating one blocks until all members have done so.

    Args:
        exchange: The engine's exchange for the set.
        unique_id: Id of the communicator, the same on all members.
        device: Index of this rank's GPU.
    """

    def __init__(self, exchange: Exchange, unique_id: bytes, device: int) -> None:
        self._exchange, self._device = exchange, device
        nccl.use(device)
        self._stream = nccl.new_stream()
        try:
            self._communicator: Any = nccl.connect(unique_id, exchange.size, exchange.rank)
        except Exception as error:
            raise self._failed([], str(error)) from error
        # The event after each batch, its requests (which keep memory alive), and when it was enqueued.
        self._in_flight: deque[tuple[Any, Sequence[Request], float]] = deque()
        self._memory: Any = None  # Used if this rank has joined: the first half is zero.

    def execute(self, pairs: Sequence[tuple[Description, Request | None]], members: Sequence[int]) -> Steps:
        """Enqueue a batch. See ``DeviceExchange``."""
        if self._communicator is None:
            raise ShutDownError("The communicator for these tensors is closed, so they cannot be exchanged.")
        yield from ()
        nccl.use(self._device)
        requests = [request for _, request in pairs if request is not None]
        for event in [request.ready for request in requests if request.ready is not None]:
            self._stream.wait(event)
        runs = [(d, request, *run) for d, request in pairs for run in _runs(d)]
        self._allocate(max([nbytes for _, request, *_, nbytes in runs if request is None], default=0))
        try:
            with nccl.group():
                for d, request, index, dtype, nbytes in runs:
                    self._enqueue(d, members, dtype, nbytes, *self._addresses(request, index))
        except Exception as error:
            raise self._failed(requests, str(error)) from error
        event = self._stream.record()
        self._in_flight.append((event, requests, time.monotonic()))
        self._exchange.context.achieved += 1
        return [_results(request, event) for _, request in pairs]

    def _allocate(self, nbytes: int) -> None:
        """Provide memory for a rank that has joined: zeros to send, and space for the results."""
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if nbytes and (self._memory is None or self._memory.size < 2 * nbytes):
            self._memory = nccl.zeros(2 * nbytes, self._stream)

    def _addresses(self, request: Request | None, index: int) -> tuple[int, int]:
        """Return where the data of a run is read and written. ``index``: index of the run's first tensor."""
        if request is None:
            start = int(self._memory.handle)
            return start, start + self._memory.size // 2
        source: Any = request.inputs[index]
        target: Any = request.outputs and request.outputs[index]
        return source.address, target.address

    def _enqueue(
        self, d: Description, members: Sequence[int], dtype: str, nbytes: int, source: int, target: int
    ) -> None:
        where, size = (self._communicator, int(self._stream.handle)), self._exchange.size
        average, count = d.operation is ReduceOp.AVERAGE, nbytes // dtype_named(dtype).itemsize
        if d.kind is Collective.ALLREDUCE:
            nccl.all_reduce(source, target, count, dtype, average, *where)
        elif d.kind is Collective.REDUCESCATTER:
            nccl.reduce_scatter(source, target, count // size, dtype, average, *where)
        elif d.kind is Collective.BROADCAST:
            nccl.broadcast(source, target, nbytes, members.index(d.root), *where)
        elif d.kind is Collective.ALLGATHER:
            nccl.all_gather(source, target, nbytes, *where)
        elif d.kind is Collective.ALLTOALL:
            part = nbytes // size
            for rank in range(size):
                nccl.send(source + rank * part, part, rank, *where)
                nccl.receive(target + rank * part, part, rank, *where)
        else:
            raise AssertionError(f"NcclExchange does not support the collective {d.kind.name}.")

    def check(self) -> None:
        """Raise RankLostError if NCCL has failed."""
        if self._communicator is None:
            return
        failure = nccl.failure_of(self._communicator)
        while self._in_flight and self._in_flight[0][0].is_done:
            self._in_flight.popleft()
        if not failure and self._in_flight and time.monotonic() - self._in_flight[0][2] > _TIMEOUT_S:
            failure = f"the exchange has not completed within {_TIMEOUT_S:g} s"
        if failure:
            raise self._failed(self._in_flight[0][1] if self._in_flight else [], failure)

    def _failed(self, requests: Sequence[Request], failure: str) -> RankLostError:
        names = ", ".join([one.name or one.description.kind.name.lower() for one in requests])
        where = f"rank {self._exchange.rank} (host {socket.gethostname()}, GPU {self._device})"
        return RankLostError(nccl_failure("NCCL", where, names, failure))

    def in_flight(self) -> bool:
        """Return True if an exchange has been enqueued, but is not complete."""
        return unfinished(self._in_flight, lambda event: event.is_done)

    def close(self, agreed: bool) -> None:
        """Free the communicator. Unless ``agreed`` and idle, abort it in a thread, which can take a while."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if agreed and not self.in_flight():
            nccl.use(self._device)
            nccl.destroy(communicator)
        else:
            threading.Thread(target=self._abort, args=(communicator,), daemon=True).start()

    def _abort(self, communicator: Any) -> None:
        nccl.abort(communicator)
        self._in_flight.clear()  # Until here, NCCL may use the memory of these requests.


def _runs(d: Description) -> Iterator[tuple[int, str, int]]:
    """Yield the index of the first tensor of each dtype, the dtype, and its tensors' size in bytes."""
    for dtype in dict.fromkeys(d.dtypes):
        shapes = [shape for shape, other in zip(d.shapes, d.dtypes, strict=True) if other == dtype]
        yield d.dtypes.index(dtype), dtype, sum(map(math.prod, shapes)) * dtype_named(dtype).itemsize


def unfinished(batches: deque[Any], occurred: Callable[[Any], bool]) -> bool:
    """Return True if the event of the last batch has not occurred, or cannot, because the device has failed.

    Batches end in order, so the last one is enough. Any thread may call this: it does not iterate.
    """
    try:
        return not occurred(batches[-1][0])
    except IndexError:
        return False
    except Exception:
        return True


def _results(request: Request | None, event: Any) -> DeviceResults:
    results = DeviceResults(() if request is None else request.outputs or ())
    results.event = event
    return results


def nccl_failure(library: str, where: str, names: str, failure: str) -> str:
    """Return the message for an error that NCCL has detected."""
    return (
        f"{library} failed on {where} during '{names or 'an exchange'}' or a later exchange: {failure}. Look "
        "for the first rank that exited and for Xid errors in the kernel log (dmesg), and run again with "
        "NCCL_DEBUG=WARN to see NCCL's own message."
    )


def make_exchange(advice: str, local_rank: int, exchange: Exchange, kind: str) -> Steps:
    """Create the ``NcclExchange`` of a process set. ``kind`` is always ``DEVICE``."""
    assert exchange.context.on_thread is not None
    device = _device[0] if _device else local_rank % nccl.device_count()
    yield from check_devices(exchange, nccl.use(device), advice)
    own = nccl.unique_id() if exchange.rank == 0 else b""
    unique_id = yield from exchange.broadcast_bytes(own, 0)
    return (yield from exchange.context.on_thread(lambda: NcclExchange(exchange, unique_id, device)))


def check_devices(exchange: Exchange, uuid: str, advice: str) -> Steps:
    """Raise ArgumentError on all members if several of them use the same GPU."""
    own = json.dumps([socket.gethostname(), uuid]).encode()
    gpus = [tuple(json.loads(item)) for item in (yield from exchange.gather_bytes(own))]
    ranks = Counter(gpus)
    shared = [rank for rank, item in enumerate(gpus) if ranks[item] > 1]
    if shared and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise ArgumentError(
            f"Ranks {', '.join(map(str, shared))} share a GPU with other ranks on host {gpus[shared[0]][0]}. "
            f"{advice}, and start at most one rank per GPU."
        )
