"""The engine of this process, from ``init()`` until Python exits.

Bindings and the training layer get it from ``engine()``. No module below this one has module-level
state of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringdance import settings as settings_module
from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.core.recorder import Profiler, StepMark
from ringdance.core.transport.base import Transport
from ringdance.core.transport.single import OutsideTransport, SingleTransport
from ringdance.errors import ArgumentError, LaunchError, NotInitializedError
from ringdance.settings import Settings
from ringdance.settings.names import RANK_NAMES, RANK_VARIABLES, SIZE_NAMES, STARTED_BY
from ringdance.training.ending import Process

_log = logging.getLogger("ringdance")

# Settings that determine the layout of shared memory, how batches are cut and what is exchanged. They
# must be equal on all ranks.
_COMMON = (
    "autotune", "cache_capacity", "check_weights", "cpu_operations", "deterministic", "fusion_threshold",
    "gpu_operations", "chunk_bytes", "small_bytes", "sparse", "tuned", "window",
)  # fmt: skip

_ONE_PROCESS = "If you want a single process, call hvd.init([0])."

# Variables that distinguish a rank from other ranks and from the ranks of other jobs.
_OF_A_LAUNCH = (*RANK_NAMES, *SIZE_NAMES, "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")

_process = Process()
_lock = threading.Lock()


def engine() -> Engine:
    """Return the engine. Raises NotInitializedError before ``init()`` and after ``shutdown()``."""
    active: Engine | None = _process.engine
    if active is None:
        raise NotInitializedError("Ringdance has not been initialized; call hvd.init() first.")
    return active


def is_initialized() -> bool:
    """Return True if this process has joined a job and has not left it."""
    return _process.engine is not None


def mark_step(mark: StepMark = StepMark.OPTIMIZER) -> None:
    """Count a step that ends now. Does nothing outside a job."""
    if (active := _process.engine) is not None:
        active.recorder.step(mark)
        if active.on_step is not None:
            active.on_step()


def add_profiler(profiler: Profiler) -> None:
    """Show waits in a framework's profiler too, whenever that profiler is running."""
    at_init(lambda: engine().profilers.append(profiler))


def at_init(function: Callable[[], None]) -> None:
    """Call a function each time this process joins a job, and at once if it is in a job already."""
    _process.at_init += (function,)
    if _process.engine is not None:
        function()


def note_unseen(error: Exception | None) -> None:
    """Record how the last exchange in a compiled program ended.

    The script may never have seen the error, so this rank fails with it at exit.

    Args:
        error: The error of the exchange. None clears it: nothing that depends on a failed program runs,
            so a later success shows that the script has continued.
    """
    _process.unseen = None if error is None else (_process.engine, error)


def watch_training(has_trained: Callable[[], bool] | None) -> None:
    """Warn at exit if rank 0 has trained without reducing anything.

    Args:
        has_trained: Returns True if this rank has trained. None once the rank has reduced something, so
            that no warning is needed.
    """
    _process.has_trained = has_trained


def metrics() -> dict[str, Any]:
    """Return what this rank has done so far. Local and cheap: call it as often as you like.

    Returns:
        ``rank``, ``size``, ``host``; ``seconds`` since ``init()``; ``steps``; ``steps_per_second`` since the
        first step and ``recent_steps_per_second`` since the last call; ``exposed_seconds``, the time that
        training waited for results, as ``exposed_share`` of the time since the first step, and as
        ``recent_exposed_share`` since the last call; ``batches``, ``tensors`` and ``bytes`` exchanged.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """
    active = engine()
    active.recorder.publish()
    return {"rank": active.rank, "size": active.size, "host": active.identity.host} | active.summary.metrics()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start writing a timeline of all ranks. See the setting ``timeline``.

    Args:
        file_path: Path on rank 0's host. An existing file is overwritten.
        mark_cycles: If True, mark each round of agreement too.

    Raises:
        NotInitializedError: ``init()`` has not been called.
        ArgumentError: The setting ``timeline`` is not set ("DYNAMIC" prepares for this call).
    """
    _process.monitoring.start_timeline(engine(), os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline's file. Raises NotInitializedError before ``init()``."""
    _process.monitoring.stop_timeline(engine())


def pause_stall_check(what: str, timeout: float = 3600.0) -> contextlib.AbstractContextManager[None]:
    """Mark work that takes long on one rank: ``with hvd.pause_stall_check("evaluation"):``.

    While the block runs, no rank warns that it is waiting for this rank, or gives up after the stall
    shutdown time.

    Args:
        what: A word or two that describe the work. After ``timeout``, warnings name it.
        timeout: Seconds that the work may take.

    Raises:
        ArgumentError: ``timeout`` is not positive.
    """
    if not timeout > 0:
        raise ArgumentError(f"pause_stall_check(timeout={timeout!r}): use a number of seconds above 0.")
    return engine().pause_stall_check(str(what), timeout) if is_initialized() else contextlib.nullcontext()


def init(comm: Any = None, transport: tuple[int, Callable[..., Transport]] | None = None) -> None:
    """Join the job. All its ranks must call this. Does nothing if this process is already initialized.

    Args:
        comm: None for all processes that the launcher started, a list of their ranks, or an
            mpi4py communicator. ``[0]`` without a launcher means one process, even if a scheduler has
            allocated more hosts.
        transport: Number of ranks and the function that makes the transport, if MPI does not know the
            ranks. Kept for later calls.

    Raises:
        LaunchError: The launcher and the MPI library do not belong together, MPI is missing, or a scheduler
            has allocated several hosts to the job and this process is the only one.
        ArgumentError: ``comm`` is of another type, or this process is not in it.
        NotInitializedError: A rank has started this process and ``transport`` is set, which does not
            support that. Without ``transport`` the process joins no job: as in a forked process, ``rank()``
            and ``size()`` work and collectives raise this error.
    """
    with _lock:
        if is_initialized():
            return
        rank = _started_by()
        if rank is not None and (transport is None or rank["place"][1] > 1):
            _process.engine = _outside(rank, settings_module.load())
            if transport is not None:
                error, _process.engine = _process.engine.end.error(), None
                raise error
            for function in _process.at_init:
                function()
            return
        if _process.mpi and _process.pid != os.getpid():
            raise NotInitializedError(
                f"This process (pid {os.getpid()}) was forked from a rank (pid {_process.pid}) and cannot "
                "join its job: MPI does not survive a fork. Call init() in the rank only."
            )
        settings = settings_module.load()
        if "horovod" in sys.modules and settings.origin("deadlock_time") == "default":
            settings = replace(settings, deadlock_time=0.0)  # Horovod warns and waits forever
        _configure_log(settings)
        _process.transport = source = transport or _process.transport
        _process.engine = _start(comm, settings) if source is None else _start_by(*source, settings)
        _process.comm, _process.unseen = comm, None
        with contextlib.suppress(OSError, KeyError):  # for host/site/sitecustomize.py
            here = os.environ["RINGDANCE_JOB_DIRECTORY"], f"joined.{os.environ['RINGDANCE_RANK']}"
            open(os.path.join(*here), "wb").close()
        _process.monitoring.start(_process.engine)
        _process.tuner = None
        if settings.autotune or settings.tuned:
            from ringdance.training.tuning.autotune import tuner_of

            _process.tuner = tuner_of(_process.engine)
        _export_ranks(_process.engine)
        _mark_children(_process.engine, source is None)
        if not _process.pid:
            _process.watch()
        _process.pid = os.getpid()
        for function in _process.at_init:
            function()


def shutdown() -> None:
    """Leave the job. All ranks stop, and operations that wait for this rank fail with ShutDownError."""
    engine_left = _leave()
    if engine_left is not None:
        if _process.pid == os.getpid():
            _process.show_summary(engine_left)
        _process.monitoring.end(engine_left)


def _leave() -> Engine | None:
    with _lock:
        if _process.tuner is not None and _process.engine is not None:
            _process.tuner.restore()
        leaving, _process.engine = _process.engine, None
    if leaving is not None:
        _process.clean &= leaving.shutdown()
    return leaving


def regroup() -> Any:
    """Leave the job and wait until all ranks have called this.

    The job can be started again afterwards. This also works after the engine has failed, as long as all
    processes are alive.

    Returns:
        The ``comm`` argument of ``init``, for the next call.

    Raises:
        RankLostError: A process has exited, or did not call this within the setting ``elastic_timeout``.
    """
    ended = engine()
    _leave()
    _process.monitoring.end(ended)
    if _process.mpi and ended.size > 1:
        from ringdance.core.transport.world import wait_for_restart

        settings = ended.settings
        peers = ended.transport.identities
        wait_for_restart(_process.comm, peers, settings.init_timeout, settings.elastic_timeout)
        _process.clean = True  # whatever failed before, all ranks have left that job
    return _process.comm


def launched_size() -> int | None:
    """Return the number of processes that a launcher claims to have started, or None without a launcher."""
    if not any(name in os.environ for name in RANK_NAMES):
        return None
    return next((int(os.environ[name]) for name in SIZE_NAMES if os.environ.get(name, "").isdigit()), 1)


def _start(comm: Any, settings: Settings) -> Engine:
    launched, loaded = launched_size(), "mpi4py.MPI" in sys.modules
    if comm is None and (launched is None or (launched == 1 and not loaded)):
        _check_hosts(1)
        return Engine(SingleTransport(), settings, ring=_process.monitoring.ring(settings))
    from ringdance.core.transport.library import library_version
    from ringdance.core.transport.world import rank_list, world_transport

    if launched is None and not loaded:
        if any(rank_list(comm)):
            raise ArgumentError(
                f"init(comm={comm}): no launcher started this process, so it is its own job and the only "
                "rank is 0. Start it with `ringdance run -np N` or mpiexec."
            )
        return Engine(SingleTransport(), settings, ring=_process.monitoring.ring(settings))

    _process.monitoring.prepare()
    threads = not settings.mpi_threads_disable
    known = _of_transport(settings, _world_size(launched))
    least = buffer_bytes(settings)
    transport = world_transport(
        comm, **known, least_bytes=least, timeout=settings.init_timeout, threads=threads
    )
    _process.mpi = True
    if comm is None and launched and launched > 1 and transport.size == 1:
        raise LaunchError(
            f"The launcher started {launched} processes, but MPI sees only this one on host "
            f"{socket.gethostname()}: mpiexec and the library that mpi4py loads do not belong together "
            f"({library_version()}). Start the job with that library's mpiexec, next to {sys.executable}, "
            "with `ringdance run`, or under Slurm with `srun --mpi=pmix` (Open MPI) or `--mpi=pmi2` (MPICH)."
        )
    if comm is None and len(transport.host_group) == transport.size:
        _check_hosts(transport.size)
    ring = _process.monitoring.ring(settings)
    threaded = threads and transport.several_threads
    return Engine(transport, settings, threaded=threaded, report=_log.warning, ring=ring)


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


def _start_by(size: int, make: Callable[..., Transport], settings: Settings) -> Engine:
    _process.monitoring.prepare()
    transport = make(**_of_transport(settings, size))
    return Engine(transport, settings, report=_log.warning, ring=_process.monitoring.ring(settings))


def _of_transport(settings: Settings, size: int) -> dict[str, Any]:
    """Return the arguments of every transport. ``size`` is an upper bound of the number of ranks."""
    common = {name: getattr(settings, name) for name in _COMMON}
    # Not from the package's metadata, which a source tree on PYTHONPATH does not have.
    common["the version of ringdance"] = sys.modules["ringdance"].__version__
    return {
        "window_bytes": buffer_bytes(settings, tuned=True),
        "vector_bytes": vector_bytes(size, settings.cache_capacity), "common": common,
    }  # fmt: skip


def _export_ranks(found: Engine) -> None:
    """Set the variables from which scripts read their rank, as ``ringdance run`` does."""
    if not _process.mpi:
        return
    for name in RANK_VARIABLES:
        value = str(getattr(found, name.lower()))
        os.environ[f"RINGDANCE_{name}"] = os.environ[f"HOROVOD_{name}"] = value
    os.environ["HOROVOD_HOSTNAME"] = found.identity.host


def _mark_children(found: Engine, by_mpi: bool) -> None:
    """Mark the environment so that child processes know that they are not this rank.

    They inherit its variables. Processes that a launcher starts for a job of their own get other values.
    """
    if found.size > 1 or (by_mpi and _world_size(launched_size()) > 1):
        names = _OF_A_LAUNCH if by_mpi else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        place = found.rank, found.size, found.local_rank, found.local_size, found.cross_rank, found.cross_size
        noted = {"pid": os.getpid(), "place": place, "launch": {name: os.environ.get(name) for name in names}}
        os.environ[STARTED_BY] = json.dumps(noted)
    else:
        os.environ.pop(STARTED_BY, None)  # set by an earlier init()


def _started_by() -> dict[str, Any] | None:
    """Return the record of the rank that started this process, or None if no rank did."""
    noted: dict[str, Any] | None = json.loads(os.environ.get(STARTED_BY, "null"))
    if noted is None or noted["pid"] == os.getpid():
        return None
    return noted if all(os.environ.get(name) == value for name, value in noted["launch"].items()) else None


def _outside(noted: dict[str, Any], settings: Settings) -> Engine:
    """Return an engine that is in no job and answers for the rank that started this process."""
    rank, size, *place = noted["place"]
    outside = Engine(OutsideTransport(rank, size, noted["pid"]), settings, threaded=False)
    outside.local_rank, outside.local_size, outside.cross_rank, outside.cross_size = place
    outside.disown("was started by")
    return outside


def _world_size(launched: int | None) -> int:
    """Return an upper bound of the job's size, also before MPI is initialized."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi and mpi.Is_initialized() else launched or 1


def _configure_log(settings: Settings) -> None:
    if _log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    stamp = "" if settings.log_hide_time else "[%(asctime)s] "
    handler.setFormatter(logging.Formatter(stamp + "%(message)s"))
    _log.addHandler(handler)
    _log.propagate = False
    _log.setLevel({"trace": "DEBUG", "fatal": "CRITICAL"}.get(settings.log_level, settings.log_level.upper()))
