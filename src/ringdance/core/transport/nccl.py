"""NCCL, and the few CUDA calls that it needs, through NVIDIA's own Python packages.

``nccl4py`` and ``cuda-bindings``, which the extra ``gpu`` installs, provide them. NCCL itself is part of the CUDA
packages of JAX. Communicators, streams and events are these packages' objects, memory addresses are integers. All
calls on a stream return once the work is enqueued.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The dtypes that NCCL can add, with its names for them.
TYPES = {
    "int8": "Int8", "uint8": "Uint8", "int32": "Int32", "uint32": "Uint32", "int64": "Int64", "uint64": "Uint64",
    "float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32", "float64": "Float64",
}  # fmt: skip


class Nccl:
    """The calls that ``NcclExchange`` uses. They refer to the calling thread's current GPU."""

    @functools.cached_property
    def _calls(self) -> Any:
        from nccl.bindings import nccl

        return nccl

    @functools.cached_property
    def _types(self) -> dict[str, int]:
        return {name: int(self._calls.DataType[theirs]) for name, theirs in TYPES.items()}

    @functools.cached_property
    def version(self) -> int:
        """The version of NCCL, such as 23007 for 2.30.7. 0 if NCCL, a GPU or one of the packages is missing."""
        try:
            return int(self._calls.get_version()) if self.device_count() else 0
        except Exception:  # The packages load their libraries in these calls and raise many kinds of exceptions.
            return 0

    # Devices, streams and memory.

    def device_count(self) -> int:
        """Return the number of GPUs that this process can use."""
        import cuda.core

        return len(cuda.core.Device.get_all_devices())

    def current_device(self) -> int:
        """Return the index of the calling thread's current GPU."""
        import cuda.core

        return int(cuda.core.Device().device_id)

    def use(self, device: int) -> str:
        """Make a GPU the calling thread's current GPU, and return its UUID."""
        import cuda.core

        gpu = cuda.core.Device(device)
        gpu.set_current()
        return str(gpu.uuid)

    def new_stream(self) -> Any:
        """Create a stream."""
        import cuda.core

        return cuda.core.Device().create_stream()

    def stream_at(self, handle: int) -> Any:
        """Return a framework's stream as an object."""
        import cuda.core

        return cuda.core.Stream.from_handle(handle) if handle else cuda.core.LEGACY_DEFAULT_STREAM

    def zeros(self, nbytes: int, stream: Any) -> Any:
        """Enqueue the allocation of ``nbytes`` zero bytes. The result's ``handle`` is the address."""
        import cuda.core

        memory = cuda.core.Device().allocate(nbytes, stream=stream)
        memory.fill(0, stream=stream)
        return memory

    # Communicators.

    def unique_id(self) -> bytes:
        """Return a new id, with which the members of a communicator find each other."""
        return bytes(self._calls.get_unique_id())

    def connect(self, unique_id: bytes, size: int, rank: int) -> Any:
        """Create a communicator. Blocks until all members have called this."""
        return self._calls.comm_init_rank_scalable(size, rank, 1, bytearray(unique_id), 0)

    def failure_of(self, communicator: Any) -> str:
        """Return the error that NCCL has detected, or an empty string if there is none."""
        result = self._calls.Result(self._calls.comm_get_async_error(communicator))
        return "" if result.name in ("Success", "InProgress") else str(result.name)

    def destroy(self, communicator: Any) -> None:
        """Free a communicator whose work is complete."""
        self._calls.comm_destroy(communicator)

    def abort(self, communicator: Any) -> None:
        """Free a communicator. Its unfinished work ends with undefined results."""
        self._calls.comm_abort(communicator)

    # Collectives on addresses. Each one enqueues its work on ``stream``.

    @contextmanager
    def group(self) -> Iterator[None]:
        """Collect the calls within the block and enqueue them together, because they may depend on each other."""
        self._calls.group_start()
        try:
            yield
        finally:
            self._calls.group_end()

    def all_reduce(
        self, source: int, target: int, count: int, dtype: str, average: bool, communicator: Any, stream: Any
    ) -> None:
        """Add or average ``count`` elements."""
        numbers = self._types[dtype], self._operation(average)
        self._calls.all_reduce(source, target, count, *numbers, communicator, int(stream.handle))

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: str, average: bool, communicator: Any, stream: Any
    ) -> None:
        """Add or average. Each member receives ``count`` elements of the result."""
        numbers = self._types[dtype], self._operation(average)
        self._calls.reduce_scatter(source, target, count, *numbers, communicator, int(stream.handle))

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, communicator: Any, stream: Any
    ) -> None:
        """Copy ``nbytes`` bytes from the root's source to all targets."""
        byte = self._types["uint8"]
        self._calls.broadcast(source, target, nbytes, byte, root, communicator, int(stream.handle))

    def all_gather(self, source: int, target: int, nbytes: int, communicator: Any, stream: Any) -> None:
        """Copy ``nbytes`` bytes of each member to all targets, in order of rank."""
        self._calls.all_gather(source, target, nbytes, self._types["uint8"], communicator, int(stream.handle))

    def send(self, source: int, nbytes: int, rank: int, communicator: Any, stream: Any) -> None:
        """Send bytes to a member. Only within ``group``."""
        self._calls.send(source, nbytes, self._types["uint8"], rank, communicator, int(stream.handle))

    def receive(self, target: int, nbytes: int, rank: int, communicator: Any, stream: Any) -> None:
        """Receive bytes from a member. Only within ``group``."""
        self._calls.recv(target, nbytes, self._types["uint8"], rank, communicator, int(stream.handle))

    def _operation(self, average: bool) -> int:
        operations = self._calls.RedOp
        return int(operations.Avg if average else operations.Sum)
