"""NCCL, and the few CUDA calls that it needs, through NVIDIA's own Python packages.

The extra ``gpu`` installs the packages (``nccl4py`` and ``cuda-bindings``). NCCL itself is one of the CUDA
packages of JAX. Streams, events and communicators are objects of these packages, addresses are integers.
Calls that take a stream return once the work is enqueued.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OLDEST = 22300  # The first version with ncclCommInitRankScalable.
# The dtypes that NCCL can add, with its names for them.
TYPES = {
    "int8": "Int8", "uint8": "Uint8", "int32": "Int32", "uint32": "Uint32", "int64": "Int64",
    "uint64": "Uint64", "float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32",
    "float64": "Float64",
}  # fmt: skip


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Within the block, set environment variables that the user has not set.

    They are unset again afterwards, because the user's own process groups would also read them.
    """
    missing = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class Nccl:
    """The calls that ``NcclExchange`` uses. They refer to the calling thread's current GPU."""

    problem = ""  # Why ``version`` is 0.

    @functools.cached_property
    def _calls(self) -> Any:
        from nccl.bindings import nccl

        return nccl

    @functools.cached_property
    def _cuda(self) -> Any:
        import cuda.core

        return cuda.core

    @functools.cached_property
    def version(self) -> int:
        """The version of NCCL, such as 23007 for 2.30.7. 0 if it cannot be used: see ``problem``."""
        try:
            version = int(self._calls.get_version())
            self.problem = "" if self.device_count() else "no GPU was found"
        except Exception as error:  # These calls load libraries, which can raise many kinds of exceptions.
            version, self.problem = 0, f"{type(error).__name__}: {error}"
        if version and version < _OLDEST:
            self.problem = f"NCCL {version} is older than {_OLDEST}"
        return 0 if self.problem else version

    # Devices, streams and memory.

    def device_count(self) -> int:
        """Return the number of GPUs that this process can use."""
        return len(self._cuda.Device.get_all_devices())

    def device_of(self, address: int) -> int:
        """Return the index of the GPU that holds an address."""
        from cuda.bindings import driver

        ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        result, device = driver.cuPointerGetAttribute(ordinal, address)
        if result:
            raise RuntimeError(f"The memory at {address:#x} does not belong to a GPU ({result.name}).")
        return int(device)

    def use(self, device: int) -> str:
        """Make a GPU the calling thread's current GPU. Returns its UUID."""
        gpu = self._cuda.Device(device)
        gpu.set_current()
        return str(gpu.uuid)

    def new_stream(self) -> Any:
        """Create a stream."""
        return self._cuda.Device().create_stream()

    def stream_at(self, handle: int) -> Any:
        """Return the stream with a framework's handle. 0 is the default stream."""
        return self._cuda.Stream.from_handle(handle) if handle else self._cuda.LEGACY_DEFAULT_STREAM

    def zeros(self, nbytes: int, stream: Any) -> Any:
        """Allocate ``nbytes`` zero bytes. The result's ``handle`` is the address."""
        memory = self._cuda.Device().allocate(nbytes, stream=stream)
        memory.fill(0, stream=stream)
        return memory

    # Communicators.

    def unique_id(self) -> bytes:
        """Create the identifier of a communicator, which all its members need."""
        return bytes(self._calls.get_unique_id())

    def connect(self, unique_id: bytes, size: int, rank: int) -> Any:
        """Create a communicator. Blocks until all members have called this."""
        with environment(NCCL_RUNTIME_CONNECT="0"):  # A launch must not wait for other ranks.
            return self._calls.comm_init_rank_scalable(size, rank, 1, bytearray(unique_id), 0)

    def failure_of(self, communicator: Any) -> str:
        """Return the error that NCCL has detected, or an empty string if there is none."""
        result = self._calls.Result(self._calls.comm_get_async_error(communicator))
        return "" if result.name in ("Success", "InProgress") else str(result.name)

    def destroy(self, communicator: Any) -> None:
        """Free a communicator whose work is complete."""
        self._calls.comm_destroy(communicator)

    def abort(self, communicator: Any) -> None:
        """Abort the unfinished work of a communicator and free it."""
        self._calls.comm_abort(communicator)

    # Collectives. ``source`` and ``target`` are addresses. ``where``: the communicator, the stream's handle.

    @contextmanager
    def group(self) -> Iterator[None]:
        """Enqueue all calls in the block together, so that none of them waits for a later one."""
        self._calls.group_start()
        try:
            yield
        finally:
            self._calls.group_end()

    def all_reduce(
        self, source: int, target: int, count: int, dtype: str, average: bool, *where: Any
    ) -> None:
        """Add or average ``count`` elements."""
        self._calls.all_reduce(source, target, count, self._type(dtype), self._operation(average), *where)

    def reduce_scatter(
        self, source: int, target: int, count: int, dtype: str, average: bool, *where: Any
    ) -> None:
        """Add or average. Each member receives ``count`` elements of the result."""
        self._calls.reduce_scatter(source, target, count, self._type(dtype), self._operation(average), *where)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, *where: Any) -> None:
        """Copy the root's bytes to all targets."""
        self._calls.broadcast(source, target, nbytes, self._type("uint8"), root, *where)

    def all_gather(self, source: int, target: int, nbytes: int, *where: Any) -> None:
        """Copy ``nbytes`` bytes from each member to all targets, in rank order."""
        self._calls.all_gather(source, target, nbytes, self._type("uint8"), *where)

    def send(self, source: int, nbytes: int, rank: int, *where: Any) -> None:
        """Send bytes to a member, which must receive them."""
        self._calls.send(source, nbytes, self._type("uint8"), rank, *where)

    def receive(self, target: int, nbytes: int, rank: int, *where: Any) -> None:
        """Receive bytes from a member, which must send them."""
        self._calls.recv(target, nbytes, self._type("uint8"), rank, *where)

    def _type(self, dtype: str) -> int:
        return int(self._calls.DataType[TYPES[dtype]])

    def _operation(self, average: bool) -> int:
        return int(self._calls.RedOp.Avg if average else self._calls.RedOp.Sum)
