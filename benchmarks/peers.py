"""The job of a benchmark (modules, MPI, gloo, shared window) and the contestants to compare modules with.

This module imports frameworks, so only ranks load it.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from common import about_machine, cores
from torch.distributed import TCPStore  # type: ignore[attr-defined]

Floats = npt.NDArray[np.float32]
#: A part of a tensor in the list: (index of the tensor, first element, end).
Span = tuple[int, int, int]
MB = 1 << 20
KB = 1 << 10
FLOAT_BYTES = 4


class Job:
    """The ranks of this run and the modules that are measured in it.

    Attributes:
        comm: Communicator that only the benchmark uses.
        modules: Measured modules by name, initialized.
        about: Facts for the head of the report.
    """

    def __init__(self, names: Sequence[str]) -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
        # Import modules before MPI: a module may initialize MPI itself with its own settings.
        self.modules: dict[str, Any] = {name: importlib.import_module(name) for name in names}
        for module in self.modules.values():
            module.init()
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            atexit.register(_finalize)
        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.host = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        for name, module in self.modules.items():
            if module.size() != self.size:
                raise RuntimeError(
                    f"{name}.size() is {module.size()} but MPI started {self.size} ranks: "
                    "the module does not recognize this launcher"
                )
        local = self.host.Get_size()
        torch.set_num_threads(threads or max(1, cores() // local))
        leaders = self.comm.allreduce(int(self.host.Get_rank() == 0))
        library = MPI.Get_library_version().replace("\x00", "").split(",")[0].splitlines()[0].strip()
        self.about: dict[str, Any] = {
            **about_machine(), "ranks": self.size, "hosts": leaders, "threads": torch.get_num_threads(),
            "torch": torch.__version__, "numpy": np.__version__, "mpi": library,
            "modules": {name: str(getattr(one, "__version__", "")) for name, one in self.modules.items()},
        }  # fmt: skip
        self._windows: list[Any] = []
        self._gloo = False

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def agreed(self, verdict: bool) -> bool:
        """Return rank 0's ``verdict`` on all ranks."""
        return bool(self.comm.bcast(verdict))

    def gather(self, samples: Sequence[float]) -> list[list[float]]:
        """Return the samples of each rank, on all ranks."""
        return [list(part) for part in self.comm.allgather(list(samples))]

    def gloo(self) -> None:
        """Create torch.distributed's default group with gloo. Rank 0 serves the TCP store."""
        if self._gloo:
            return
        host = "127.0.0.1"
        if self.about["hosts"] > 1:
            host = self.comm.bcast(self.mpi.Get_processor_name())
        elif sys.platform == "linux":
            # Otherwise gloo looks up the host's name, which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = None
        if self.rank == 0:
            store = TCPStore(host, 0, self.size, is_master=True, wait_for_workers=False)
        port = self.comm.bcast(store.port if store is not None else None)
        if store is None:
            store = TCPStore(host, port, self.size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        self._gloo = True

    def window(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return this rank's ``nbytes`` in a new shared-memory window of its host, already written to."""
        window = self.mpi.Win.Allocate_shared(nbytes, 1, comm=self.host)  # type: ignore[arg-type]
        self._windows.append(window)
        memory, _ = window.Shared_query(self.host.Get_rank())
        part = np.frombuffer(memory, dtype=np.uint8)
        part[:] = 0
        return part

    def close(self) -> None:
        """Free the benchmark's resources, then shut down the modules."""
        self.barrier()
        if self._gloo:
            dist.destroy_process_group()
        for window in self._windows:
            window.Free()
        self.host.Free()
        self.comm.Free()
        for module in self.modules.values():
            module.shutdown()


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


# ---------------------------------------------------------------- how a list of tensors is cut


def cut_stream(sizes: Sequence[int], limit: int) -> list[list[Span]]:
    """Cut a list of tensors into buffers of ``limit`` elements, as if they were one stream.

    Args:
        sizes: Number of elements in each tensor.
        limit: Number of elements per buffer. All buffers except the last are full.
    """
    buffers: list[list[Span]] = [[]]
    free = limit
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if free == 0:
                buffers.append([])
                free = limit
            stop = min(size, start + free)
            buffers[-1].append((tensor, start, stop))
            free -= stop - start
            start = stop
    return buffers


def cut_chunks(sizes: Sequence[int], limit: int) -> list[list[Span]]:
    """Cut large tensors into chunks of at most ``limit`` elements, and pack small adjacent tensors together.

    A chunk with a single span can be reduced in place. A chunk with several spans must be packed.
    """
    chunks: list[list[Span]] = []
    packed: list[Span] = []
    filled = 0
    for tensor, size in enumerate(sizes):
        if size >= limit:
            chunks += [[(tensor, start, min(size, start + limit))] for start in range(0, size, limit)]
            continue
        if filled + size > limit:
            chunks.append(packed)
            packed, filled = [], 0
        packed.append((tensor, 0, size))
        filled += size
    return [chunk for chunk in [*chunks, packed] if chunk]


def _elements(spans: Sequence[Span]) -> int:
    return sum(stop - start for _, start, stop in spans)


# ---------------------------------------------------------------- contestants for a list of tensors


def module_burst(module: Any, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> Callable[[], None]:
    """Return a burst: average all tensors in place, submitted together by name, then wait for all."""
    pairs = list(zip(tensors, names, strict=True))

    def run() -> None:
        handles = [module.allreduce_async_(tensor, name=name, op=module.Average) for tensor, name in pairs]
        for handle in handles:
            module.synchronize(handle)

    return run


def mpi_packed(job: Job, arrays: Sequence[Floats], limit: int) -> Callable[[], None]:
    """Return a burst: pack tensors into buffers of ``limit`` bytes, Allreduce each, copy out averages."""
    buffer = np.zeros(limit // FLOAT_BYTES, np.float32)
    plan = []
    for spans in cut_stream([array.size for array in arrays], buffer.size):
        at, pairs = 0, []
        for tensor, start, stop in spans:
            pairs.append((arrays[tensor][start:stop], buffer[at : at + stop - start]))
            at += stop - start
        plan.append((pairs, buffer[:at]))
    return _mpi_runner(job, plan)


def mpi_chunks(job: Job, arrays: Sequence[Floats], limit: int) -> Callable[[], None]:
    """Return a burst: average chunks of at most ``limit`` bytes in place, and pack only small tensors."""
    buffer = np.zeros(limit // FLOAT_BYTES, np.float32)
    plan: list[tuple[list[tuple[Floats, Floats]], Floats]] = []
    for spans in cut_chunks([array.size for array in arrays], buffer.size):
        if len(spans) == 1:
            tensor, start, stop = spans[0]
            plan.append(([], arrays[tensor][start:stop]))
            continue
        at, pairs = 0, []
        for tensor, start, stop in spans:
            pairs.append((arrays[tensor][start:stop], buffer[at : at + stop - start]))
            at += stop - start
        plan.append((pairs, buffer[:at]))
    return _mpi_runner(job, plan)


def _mpi_runner(
    job: Job, plan: Sequence[tuple[Sequence[tuple[Floats, Floats]], Floats]]
) -> Callable[[], None]:
    comm, in_place = job.comm, job.mpi.IN_PLACE
    scale = np.float32(1 / job.size)

    def run() -> None:
        for pairs, whole in plan:
            for tensor, place in pairs:
                place[...] = tensor
            comm.Allreduce(in_place, whole)
            # If data are copied out anyway, the division needs no extra pass.
            for tensor, place in pairs:
                np.multiply(place, scale, out=tensor)
            if not pairs:
                np.multiply(whole, scale, out=whole)

    return run


def gloo_buckets(job: Job, tensors: Sequence[torch.Tensor], limit: int) -> Callable[[], None]:
    """Return a burst like DDP's: average buckets of ``limit`` bytes, all in flight at the same time."""
    plan = []
    for spans in cut_stream([tensor.numel() for tensor in tensors], limit // FLOAT_BYTES):
        bucket = torch.zeros(_elements(spans))
        at, pairs = 0, []
        for tensor, start, stop in spans:
            pairs.append((tensors[tensor][start:stop], bucket[at : at + stop - start]))
            at += stop - start
        plan.append((pairs, bucket))
    scale = 1 / job.size

    def run() -> None:
        works = []
        for pairs, bucket in plan:
            for tensor, place in pairs:
                torch.mul(tensor, scale, out=place)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work, (pairs, _) in zip(works, plan, strict=True):
            work.wait()
            for tensor, place in pairs:
                tensor.copy_(place)

    return run


def copy_through_window(job: Job, arrays: Sequence[Floats], chunk: int = 256 * KB) -> Callable[[], None]:
    """Return a burst that copies all tensors into the shared window and back, without a sum.

    It copies in chunks of ``chunk`` bytes on all ranks at the same time. This is the bound that the machine's
    memory sets for exchanges through shared memory. Ranks do not wait for each other.
    """
    window = job.window(chunk).view(np.float32)
    pairs = [
        (array[start : start + window.size], window[: min(window.size, array.size - start)])
        for array in arrays
        for start in range(0, array.size, window.size)
    ]

    def run() -> None:
        for part, place in pairs:
            np.copyto(place, part)
            np.copyto(part, place)

    return run
