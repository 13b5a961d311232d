"""The steps of ``init()``: configure logging, start the engine, and set variables for child processes."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.core.transport.base import Transport
from ringdance.core.transport.single import OutsideTransport, SingleTransport
from ringdance.errors import ArgumentError, LaunchError
from ringdance.settings import SETTINGS, Settings
from ringdance.settings.names import RANK_NAMES, RANK_VARIABLES, SIZE_NAMES, STARTED_BY
from ringdance.training.rank_monitor import RankMonitor

_log = logging.getLogger("ringdance")

_ONE_PROCESS = "If you want a single process, call hvd.init([0])."
# Variables that distinguish a rank from the other ranks in its job, and from the ranks of other jobs.
_OF_A_LAUNCH = (*RANK_NAMES, *SIZE_NAMES, "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")


def configure_log(settings: Settings) -> None:
    """Send log messages to stderr, unless the script has configured logging."""
    if _log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    stamp = "" if settings.log_hide_time else "[%(asctime)s] "
    handler.setFormatter(logging.Formatter(stamp + "%(message)s"))
    _log.addHandler(handler)
    _log.propagate = False
    _log.setLevel({"trace": "DEBUG", "fatal": "CRITICAL"}.get(settings.log_level, settings.log_level.upper()))


def start_by_mpi(comm: Any, settings: Settings, monitor: RankMonitor) -> Engine:
    """Start the engine of a rank in an MPI job, or of a single process.

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
                f"init(comm={comm}): no launcher started this process, so rank 0 is the only rank of its "
                "job. Start the script with `ringdance run -np N` or mpiexec."
            )
        return Engine(SingleTransport(), settings, ring=monitor.ring(settings))

    monitor.prepare()
    threads = not settings.mpi_threads_disable
    transport = world_transport(
        comm, **_transport_arguments(settings, _world_size()), least_bytes=buffer_bytes(settings),
        timeout=settings.init_timeout, threads=threads,
    )
    if comm is None and launched and launched > 1 and transport.size == 1:
        raise LaunchError(
            f"The launcher started {launched} processes, but MPI sees only this one on host "
            f"{socket.gethostname()}: mpiexec does not belong to the MPI library that mpi4py loads "
            f"({library_version()}). Start the job with that library's mpiexec (next to {sys.executable}), "
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
    """Start the engine of one of ``size`` ranks that are not MPI processes."""
    monitor.prepare()
    transport = make_transport(**_transport_arguments(settings, size))
    return Engine(transport, settings, report=_log.warning, ring=monitor.ring(settings))


def _check_hosts(size: int) -> None:
    """Check that the launcher or scheduler provides only the ``size`` ranks that run on this host.

    Raises:
        LaunchError: Some processes or hosts are not in the MPI job. They would train separately or stay idle.
    """
    if "RINGDANCE_JOB" in os.environ:
        return
    from ringdance.host.schedulers.detect import left_idle

    launched = size > 1 or any(name in os.environ for name in SIZE_NAMES)
    if not launched and os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        raise LaunchError(
            f"RANK={os.environ.get('RANK')} and WORLD_SIZE={os.environ['WORLD_SIZE']} were set by torchrun, "
            "but its processes do not form an MPI job, so each would train on its own. Start them with "
            '`ringdance run -np N python SCRIPT`, or call init_process_group("ringdance") before '
            f"hvd.init(). {_ONE_PROCESS}"
        )
    if allocation := left_idle(os.environ, launched):
        count = len(allocation.hosts)
        names = ", ".join(host for host, _ in allocation.hosts[:3]) + ", ..." * (count > 3)
        raise LaunchError(
            f"{allocation.source} has allocated {count} host{'s' * (count > 1)} to this job ({names}), but "
            f"all its ranks ({size}) run on {socket.gethostname()}, so the other hosts would idle or train "
            f"separately. Start the script with {allocation.start}. "
            f"{_ONE_PROCESS if size == 1 else ''}".rstrip()
        )


def _transport_arguments(settings: Settings, size: int) -> dict[str, Any]:
    """Return the arguments common to all transports. ``size``: upper bound on the number of ranks."""
    common = {setting.name: getattr(settings, setting.name) for setting in SETTINGS if setting.common}
    # Do not use the package metadata, which is missing if a source tree is on PYTHONPATH.
    common["the version of ringdance"] = sys.modules["ringdance"].__version__
    return {
        "window_bytes": buffer_bytes(settings, tuned=True),
        "vector_bytes": vector_bytes(size, settings.cache_capacity), "common": common,
    }  # fmt: skip


def launched_size() -> int | None:
    """Return the number of processes that the launcher claims to have started, or None without a launcher."""
    if not any(name in os.environ for name in RANK_NAMES):
        return None
    return next((int(os.environ[name]) for name in SIZE_NAMES if os.environ.get(name, "").isdigit()), 1)


def _world_size() -> int:
    """Return an upper bound on the size of the job. Works even before MPI is initialized."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi and mpi.Is_initialized() else launched_size() or 1


def export_ranks(engine: Engine) -> None:
    """Set the variables from which scripts read their rank, as ``ringdance run`` does."""
    for name in RANK_VARIABLES:
        value = str(getattr(engine, name.lower()))
        os.environ[f"RINGDANCE_{name}"] = os.environ[f"HOROVOD_{name}"] = value
    os.environ["HOROVOD_HOSTNAME"] = engine.identity.host


def mark_children(engine: Engine, by_mpi: bool) -> None:
    """Mark the environment so that child processes can detect that they are not this rank.

    Child processes inherit the variables. Processes that a launcher starts for another job get new values.
    """
    if engine.size == 1 and not (by_mpi and _world_size() > 1):
        os.environ.pop(STARTED_BY, None)  # set by an earlier init()
        return
    names = _OF_A_LAUNCH if by_mpi else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    place = {name.lower(): getattr(engine, name.lower()) for name in RANK_VARIABLES}
    launch = {name: os.environ.get(name) for name in names}
    os.environ[STARTED_BY] = json.dumps({"pid": os.getpid(), "place": place, "launch": launch})


@dataclass(frozen=True)
class ParentRank:
    """The rank that started this process, as described in the environment.

    Attributes:
        pid: The rank's process ID.
        place: The rank's ``rank``, ``size``, ``local_rank`` and so on, by name.
        launch: Variables set by the rank's launcher. Their values differ from one launch to the next.
    """

    pid: int
    place: dict[str, int]
    launch: dict[str, str | None]

    @classmethod
    def find(cls) -> ParentRank | None:
        """Return the rank that started this process, or None if no rank did."""
        fields = json.loads(os.environ.get(STARTED_BY, "null"))
        if fields is None or fields["pid"] == os.getpid():
            return None
        same = all(os.environ.get(name) == value for name, value in fields["launch"].items())
        return cls(**fields) if same else None

    def outside_engine(self, settings: Settings) -> Engine:
        """Return an engine that is not in a job and reports the parent's rank and size."""
        transport = OutsideTransport(self.place["rank"], self.place["size"], self.pid)
        outside = Engine(transport, settings, threaded=False)
        vars(outside).update(self.place)
        outside.disown("was started by")
        return outside
