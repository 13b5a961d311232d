"""Start the engine of a process: find the ranks of its job and connect them."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.core.transport.base import Transport
from ringdance.core.transport.single import SingleTransport
from ringdance.errors import ArgumentError, LaunchError
from ringdance.settings import Settings
from ringdance.settings.names import RANK_NAMES, SIZE_NAMES
from ringdance.training.rank_monitor import RankMonitor

_log = logging.getLogger("ringdance")

# Settings that determine the layout of shared memory, how batches are cut and what is exchanged. They
# must be equal on all ranks.
COMMON = (
    "autotune", "cache_capacity", "check_weights", "cpu_operations", "deterministic", "fusion_threshold",
    "gpu_operations", "chunk_bytes", "small_bytes", "sparse", "tuned", "window",
)  # fmt: skip

_ONE_PROCESS = "If you want a single process, call hvd.init([0])."


def start_by_mpi(comm: Any, settings: Settings, monitor: RankMonitor) -> Engine:
    """Start the engine of a process whose ranks MPI knows, or of a single process.

    Args:
        comm: The argument of ``init()``.
        settings: Settings of the engine.
        monitor: Provides the memory for the engine's records.

    Raises:
        LaunchError: The launcher and the MPI library do not match, MPI is missing, or a scheduler
            has allocated several hosts to the job and this process is the only one.
        ArgumentError: ``comm`` has the wrong type, or does not include this process.
    """
    launched, loaded = launched_size(), "mpi4py.MPI" in sys.modules
    if comm is None and (launched is None or (launched == 1 and not loaded)):
        _check_hosts(1)
        return Engine(SingleTransport(), settings, ring=monitor.ring(settings))
    from ringdance.core.transport.library import library_version
    from ringdance.core.transport.world import rank_list, world_transport

    if launched is None and not loaded:
        if any(rank_list(comm)):
            raise ArgumentError(
                f"init(comm={comm}): no launcher started this process, so it is its own job and the only "
                "rank is 0. Start it with `ringdance run -np N` or mpiexec."
            )
        return Engine(SingleTransport(), settings, ring=monitor.ring(settings))

    monitor.prepare()
    threads = not settings.mpi_threads_disable
    known = _transport_arguments(settings, world_size())
    least = buffer_bytes(settings)
    transport = world_transport(
        comm, **known, least_bytes=least, timeout=settings.init_timeout, threads=threads
    )
    if comm is None and launched and launched > 1 and transport.size == 1:
        raise LaunchError(
            f"The launcher started {launched} processes, but MPI sees only this one on host "
            f"{socket.gethostname()}: mpiexec and the library that mpi4py loads do not belong together "
            f"({library_version()}). Start the job with that library's mpiexec, next to {sys.executable}, "
            "with `ringdance run`, or under Slurm with `srun --mpi=pmix` (Open MPI) or `--mpi=pmi2` (MPICH)."
        )
    if comm is None and len(transport.host_group) == transport.size:
        _check_hosts(transport.size)
    ring = monitor.ring(settings)
    threaded = threads and transport.several_threads
    return Engine(transport, settings, threaded=threaded, report=_log.warning, ring=ring)


def start_with(
    size: int, make_transport: Callable[..., Transport], settings: Settings, monitor: RankMonitor
) -> Engine:
    """Start the engine of one of ``size`` ranks that MPI does not know."""
    monitor.prepare()
    transport = make_transport(**_transport_arguments(settings, size))
    return Engine(transport, settings, report=_log.warning, ring=monitor.ring(settings))


def _check_hosts(size: int) -> None:
    """Check that a job of ``size`` ranks on this host is the whole job of its launcher or scheduler.

    Raises:
        LaunchError: There are more processes or hosts than MPI knows. They would train separately or idle.
    """
    if "RINGDANCE_JOB" in os.environ:
        return
    from ringdance.host.schedulers.detect import left_idle

    launched = size > 1 or any(name in os.environ for name in SIZE_NAMES)
    if not launched and os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        raise LaunchError(
            f"RANK={os.environ.get('RANK')} and WORLD_SIZE={os.environ['WORLD_SIZE']} are torchrun's, "
            "and MPI does not know its processes: each would train alone. Start them with `ringdance run -np "
            f'N python SCRIPT`, or call init_process_group("ringdance") before hvd.init(). {_ONE_PROCESS}'
        )
    if allocation := left_idle(os.environ, launched):
        names = ", ".join(host for host, _ in allocation.hosts[:3]) + ", ..." * (len(allocation.hosts) > 3)
        raise LaunchError(
            f"{allocation.source} has {len(allocation.hosts)} host(s) for this job ({names}), but MPI knows "
            f"of {size} process(es), on {socket.gethostname()} only: the other hosts would idle or train "
            f"alone. Start the script by {allocation.start}. {_ONE_PROCESS if size == 1 else ''}".rstrip()
        )


def _transport_arguments(settings: Settings, size: int) -> dict[str, Any]:
    """Return the arguments of every transport. ``size`` is an upper bound of the number of ranks."""
    common = {name: getattr(settings, name) for name in COMMON}
    # Not from the package's metadata, which is missing if a source tree is on PYTHONPATH.
    common["the version of ringdance"] = sys.modules["ringdance"].__version__
    return {
        "window_bytes": buffer_bytes(settings, tuned=True),
        "vector_bytes": vector_bytes(size, settings.cache_capacity), "common": common,
    }  # fmt: skip


def launched_size() -> int | None:
    """Return the number of processes that the launcher claims to have started, or None if there is none."""
    if not any(name in os.environ for name in RANK_NAMES):
        return None
    return next((int(os.environ[name]) for name in SIZE_NAMES if os.environ.get(name, "").isdigit()), 1)


def world_size() -> int:
    """Return an upper bound of the job's size, also before MPI is initialized."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi and mpi.Is_initialized() else launched_size() or 1
