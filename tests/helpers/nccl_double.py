"""A stand-in for NCCL and CUDA that exchanges host memory between the ranks of one host.

``install()`` makes JAX's exchanges on the CPU take the path of a GPU. As with NCCL, calls are enqueued on a
stream, which is a thread here, and a lost rank blocks the stream until the communicator is aborted.
"""

from __future__ import annotations

import ctypes
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import ml_dtypes  # noqa: F401  # Registers the name bfloat16 with NumPy.
import numpy as np

from ringdance.core.exchange import nccl


def memory(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Return the bytes at an address."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


class Event:
    """A point in the work of a stream."""

    def __init__(self, complete: bool = False) -> None:
        self._reached = threading.Event()
        if complete:
            self._reached.set()

    @property
    def is_done(self) -> bool:
        return self._reached.is_set()

    def reach(self) -> None:
        self._reached.set()

    def sync(self) -> None:
        self._reached.wait()


class Stream:
    """A thread that runs its work in order."""

    by_handle: ClassVar[dict[int, Stream]] = {}

    def __init__(self) -> None:
        self.handle = len(self.by_handle) + 1
        self.by_handle[self.handle] = self
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> Event:
        event = Event()
        self.enqueue(event.reach)
        return event

    def wait(self, event: Event) -> None:
        self.enqueue(event.sync)

    def sync(self) -> None:
        self.record().sync()


class FrameworkStream:
    """The stream of a framework on the CPU, which computes at once."""

    def record(self) -> Event:
        return Event(complete=True)

    def wait(self, event: Event) -> None:
        event.sync()


class Memory:
    """Zeros."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.zeros(nbytes, np.uint8)
        self.handle, self.size = self._array.ctypes.data, nbytes


class Communicator:
    """Connections of rank 0 with all other ranks."""

    def __init__(self, unique_id: bytes, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.aborted = threading.Event()
        self.failure = ""
        self.calls: list[tuple[Any, ...]] = []  # (kind, source, target, bytes, peer, dtype, average)
        address = unique_id.decode()
        self._peers: dict[int, Connection] = {}
        if rank == 0:
            listener = _listeners.pop(address)
            for _ in range(size - 1):
                peer = listener.accept()
                self._peers[peer.recv()] = peer
            listener.close()
            os.rmdir(os.path.dirname(address))
        else:
            self._peers[0] = Client(address, "AF_UNIX")
            self._peers[0].send(rank)

    def run(self, calls: list[tuple[Any, ...]]) -> None:
        """Exchange the calls of a group. Does not return before ``abort`` if a rank is lost."""
        sent = [
            (call[0], b"" if call[0] == "receive" else memory(call[1], call[3]).tobytes(), *call[4:])
            for call in calls
        ]
        try:
            if self.rank:
                self._peers[0].send(sent)
                received = self._peers[0].recv()
            else:
                of_all = {0: sent, **{rank: peer.recv() for rank, peer in sorted(self._peers.items())}}
                results = [self._results(of_all, rank) for rank in range(self.size)]
                for rank, peer in self._peers.items():
                    peer.send(results[rank])
                received = results[0]
        except (EOFError, OSError):
            self.aborted.wait()
            return
        for call, result in zip(calls, received, strict=True):
            if result is not None:
                memory(call[2], len(result))[:] = np.frombuffer(result, np.uint8)

    def _results(self, of_all: dict[int, list[Any]], rank: int) -> list[Any]:
        """Return the result of each of a rank's calls."""
        results = []
        for index, (kind, own, peer, dtype, average) in enumerate(of_all[rank]):
            if kind == "send":
                results.append(None)
                continue
            if kind == "receive":
                sends = [call for call in of_all[peer] if call[0] == "send" and call[2] == rank]
                before = sum(call[0] == "receive" and call[2] == peer for call in of_all[rank][:index])
                results.append(sends[before][1])
                continue
            peers = [of_all[other][index] for other in range(self.size)]
            assert {call[0] for call in peers} == {kind}, peers
            assert len({len(call[1]) for call in peers}) == 1, peers
            if kind == "broadcast":
                results.append(peers[peer][1])
            elif kind == "all_gather":
                results.append(b"".join(call[1] for call in peers))
            else:
                results.append(_reduced([call[1] for call in peers], dtype, average, kind, rank))
            del own
        return results

    def abort(self) -> None:
        self.aborted.set()
        for peer in self._peers.values():
            with suppress(OSError):
                peer.close()


def _reduced(parts: list[bytes], dtype: str, average: bool, kind: str, rank: int) -> bytes:
    kind_of = np.dtype(dtype)
    wide = np.float64 if dtype == "float64" else np.float32 if "float" in dtype else kind_of
    total = sum(np.frombuffer(part, kind_of).astype(wide) for part in parts)
    if average:
        total = total / len(parts)
    if kind == "reduce_scatter":
        total = np.split(total, len(parts))[rank]
    return np.asarray(total).astype(kind_of).tobytes()


_listeners: dict[str, Listener] = {}


class NcclDouble:
    """The calls of ``Nccl`` on host memory."""

    version = 1

    def __init__(self) -> None:
        self._grouped: list[tuple[Communicator, Stream]] | None = None
        self.enqueued: list[str] = []  # The kinds of all calls so far.
        self.original_stream: Any = None  # What ``install`` has replaced.

    def device_count(self) -> int:
        return 64

    def device_of(self, address: int) -> int:
        from ringdance.training import session

        return session.engine().local_rank

    def use(self, device: int) -> str:
        return str(device)

    def new_stream(self) -> Stream:
        return Stream()

    def stream_at(self, handle: int) -> FrameworkStream:
        return FrameworkStream()

    def zeros(self, nbytes: int, stream: Stream) -> Memory:
        return Memory(nbytes)

    def unique_id(self) -> bytes:
        address = f"{tempfile.mkdtemp()}/nccl"
        _listeners[address] = Listener(address, "AF_UNIX", backlog=16)
        return address.encode()

    def connect(self, unique_id: bytes, size: int, rank: int) -> Communicator:
        return Communicator(unique_id, size, rank)

    def failure_of(self, communicator: Communicator) -> str:
        return communicator.failure

    def destroy(self, communicator: Communicator) -> None:
        communicator.abort()

    def abort(self, communicator: Communicator) -> None:
        communicator.abort()

    @contextmanager
    def group(self) -> Iterator[None]:
        self._grouped = []
        try:
            yield
        finally:
            for communicator, stream in dict.fromkeys(self._grouped):
                calls, communicator.calls = communicator.calls, []
                stream.enqueue(lambda one=communicator, calls=calls: one.run(calls))
            self._grouped = None

    def _add(self, communicator: Communicator, stream: int, *call: Any) -> None:
        assert self._grouped is not None
        self.enqueued.append(call[0])
        communicator.calls.append(call)
        self._grouped.append((communicator, Stream.by_handle[stream]))

    def all_reduce(self, source, target, count, dtype, average, communicator, stream) -> None:  # type: ignore
        nbytes = count * np.dtype(dtype).itemsize
        self._add(communicator, stream, "all_reduce", source, target, nbytes, 0, dtype, average)

    def reduce_scatter(self, source, target, count, dtype, average, communicator, stream) -> None:  # type: ignore
        nbytes = count * np.dtype(dtype).itemsize * communicator.size
        self._add(communicator, stream, "reduce_scatter", source, target, nbytes, 0, dtype, average)

    def broadcast(self, source, target, nbytes, root, communicator, stream) -> None:  # type: ignore
        self._add(communicator, stream, "broadcast", source, target, nbytes, root, "uint8", False)

    def all_gather(self, source, target, nbytes, communicator, stream) -> None:  # type: ignore
        self._add(communicator, stream, "all_gather", source, target, nbytes, 0, "uint8", False)

    def send(self, source, nbytes, rank, communicator, stream) -> None:  # type: ignore
        self._add(communicator, stream, "send", source, 0, nbytes, rank, "uint8", False)

    def receive(self, target, nbytes, rank, communicator, stream) -> None:  # type: ignore
        self._add(communicator, stream, "receive", 0, target, nbytes, rank, "uint8", False)


def install() -> NcclDouble:
    """Exchange JAX arrays in host memory as if they were on a GPU. Call it before ``init()``."""
    from jax.interpreters import mlir

    from ringdance.jax import device, exchange, ffi, programs

    double, stream = NcclDouble(), ffi._stream
    nccl.nccl = double  # type: ignore[assignment]
    device.PLATFORM = "cpu"
    ffi._stream = lambda _: 0  # XLA has no streams on the CPU
    double.original_stream = stream
    programs._may_be_quick = lambda *_: False  # JAX starts programs for a GPU from Python
    mlir.register_lowering(exchange._primitive, exchange._by_nccl, platform="cpu")
    return double
