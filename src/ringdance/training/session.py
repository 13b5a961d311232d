"""The engine of this process, from ``init()`` to the end of Python.

Bindings and the training layer ask ``engine()`` for it; nothing below this module has state
of its own.
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

# Settings on which the layout of shared memory, the cutting of batches and what is exchanged rest.
_COMMON = (
    "autotune", "cache_capacity", "check_weights", "cpu_operations", "deterministic", "fusion_threshold",
    "gpu_operations", "chunk_bytes", "small_bytes", "sparse", "tuned", "window",
)  # fmt: skip

_ONE_PROCESS = "If one process is what you want, call hvd.init([0])."

# They distinguish a rank from other ranks and from other jobs' ranks.
_OF_A_LAUNCH = (*RANK_NAMES, *SIZE_NAMES, "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")

_process = Process()
_lock = threading.Lock()


def engine() -> Engine:
    """Return the engine. Raises NotInitializedError before ``init()`` and after ``shutdown()``."""
    found: Engine | None = _process.engine
    if found is None:
        raise NotInitializedError("Ringdance has not been initialized; call hvd.init() first.")
    return found


def is_initialized() -> bool:
    """Return whether this process has joined a job, and has not left it."""
    return _process.engine is not None


def mark_step(mark: StepMark = StepMark.OPTIMIZER) -> None:
    """Count a step that ends now; without a job nothing happens."""
    if (found := _process.engine) is not None:
        found.recorder.step(mark)
        if found.on_step is not None:
            found.on_step()


def add_profiler(profiler: Profiler) -> None:
    """Show waits in a framework's profiler too, whenever that is running."""
    at_init(lambda: engine().profilers.append(profiler))


def at_init(function: Callable[[], None]) -> None:
    """Call a function each time that this process has joined a job; now, if it is in one."""
    _process.at_init += (function,)
    if _process.engine is not None:
        function()


def note_unseen(error: Exception | None) -> None:
    """Note how the last exchange in a compiled program ended: if in an error, the rank ends in it at exit.

    The script may not have got it. None: it goes on, as nothing that depends on a failed program runs.
    """
    _process.unseen = None if error is None else (_process.engine, error)


def watch_training(has_trained: Callable[[], bool] | None) -> None:
    """At the end ask whether rank 0 has trained, to say that it reduced nothing; None: it has."""
    _process.has_trained = has_trained


def metrics() -> dict[str, Any]:
    """Return what this rank has done so far; local and cheap, so call it as often as you like.

    Returns:
        ``rank``, ``size``, ``host``; ``seconds`` since ``init()``; ``steps``; ``steps_per_second`` since the
        first step and ``recent_steps_per_second`` since the last call; ``exposed_seconds`` in which training
        waited for results, as ``exposed_share`` of the time since the first step, and
        ``recent_exposed_share`` since the last call; ``batches``, ``tensors`` and ``bytes`` exchanged.

    Raises:
        NotInitializedError: before ``init()``.
    """
    found = engine()
    found.recorder.publish()
    return {"rank": found.rank, "size": found.size, "host": found.identity.host} | found.summary.metrics()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start writing a timeline of all ranks; see the setting ``timeline``.

    Args:
        file_path: on rank 0's host; overwritten.
        mark_cycles: mark each round of agreement too.

    Raises:
        NotInitializedError: before ``init()``.
        ArgumentError: the setting ``timeline`` was not given ("DYNAMIC" prepares for it).
    """
    _process.monitoring.start_timeline(engine(), os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline's file. Raises NotInitializedError before ``init()``."""
    _process.monitoring.stop_timeline(engine())


def pause_stall_check(what: str, timeout: float = 3600.0) -> contextlib.AbstractContextManager[None]:
    """Mark what takes long on one rank: ``with hvd.pause_stall_check("evaluation"):``.

    Meanwhile no rank warns that it waits for this one, nor gives up after the stall shutdown time.

    Args:
        what: a word or two; after ``timeout`` the warnings name it.
        timeout: seconds that it may take.

    Raises:
        ArgumentError: ``timeout`` is not above 0.
    """
    if not timeout > 0:
        raise ArgumentError(f"pause_stall_check(timeout={timeout!r}): give a number of seconds above 0.")
    return engine().pause_stall_check(str(what), timeout) if is_initialized() else contextlib.nullcontext()


def init(comm: Any = None, transport: tuple[int, Callable[..., Transport]] | None = None) -> None:
    """Join the job: all its ranks must call this. Does nothing when already initialised.

    Args:
        comm: None for all processes that the launcher started, a list of their ranks, or an
            mpi4py communicator. ``[0]`` without a launcher: one process, even if a scheduler has more hosts.
        transport: the number of ranks and what makes it, where MPI does not know them; kept for later calls.

    Raises:
        LaunchError: the launcher and the MPI library do not belong together, MPI is missing, or a scheduler
            has several hosts for the job and this process is the only one.
        ArgumentError: ``comm`` is neither, or this process is not in it.
        NotInitializedError: a rank has started this process, which ``transport`` is not for. Without it the
            process joins nothing: as in a forked one ``rank()`` and ``size()`` work, collectives raise this.
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
            settings = replace(settings, deadlock_time=0.0)  # Horovod warns, and waits for ever
        _configure_log(settings)
        _process.transport = given = transport or _process.transport
        _process.engine = _start(comm, settings) if given is None else _start_by(*given, settings)
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
        _mark_children(_process.engine, given is None)
        if not _process.pid:
            _process.watch()
        _process.pid = os.getpid()
        for function in _process.at_init:
            function()


def shutdown() -> None:
    """Leave the job. All ranks stop: what other ranks wait for with this one fails with ShutDownError."""
    found = _leave()
    if found is not None:
        if _process.pid == os.getpid():
            _process.show_summary(found)
        _process.monitoring.end(found)


def _leave() -> Engine | None:
    with _lock:
        if _process.tuner is not None and _process.engine is not None:
            _process.tuner.restore()
        found, _process.engine = _process.engine, None
    if found is not None:
        _process.clean &= found.shutdown()
    return found


def regroup() -> Any:
    """Leave the job and wait until all ranks have called this.

    After it the job can be started again. Also after the engine has failed, as long as all processes live.

    Returns:
        The argument of ``init``, for the next call of it.

    Raises:
        RankLostError: a process has ended, or did not call this within the setting ``elastic_timeout``.
    """
    ended = engine()
    _leave()
    _process.monitoring.end(ended)
    if _process.mpi and ended.size > 1:
        from ringdance.core.transport.world import wait_for_restart

        settings = ended.settings
        peers = ended.transport.identities
        wait_for_restart(_process.comm, peers, settings.init_timeout, settings.elastic_timeout)
        _process.clean = True  # whatever failed before, all ranks have left it
    return _process.comm


def launched_size() -> int | None:
    """Return the number of processes that a launcher says it started, None without a launcher."""
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
                f"init(comm={comm}): no launcher started this process, so it is a job of its own with rank 0 "
                "alone. Start it with `ringdance run -np N` or mpiexec."
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
            f"({library_version()}). Start the job with that library's mpiexec, beside {sys.executable}, "
            "with `ringdance run`, or under Slurm with `srun --mpi=pmix` (Open MPI) or `--mpi=pmi2` (MPICH)."
        )
    if comm is None and len(transport.host_group) == transport.size:
        _check_hosts(transport.size)
    ring = _process.monitoring.ring(settings)
    threaded = threads and transport.several_threads
    return Engine(transport, settings, threaded=threaded, report=_log.warning, ring=ring)


def _check_hosts(size: int) -> None:
    """Check that a job of `size` ranks, all on this host, is what its launcher or its scheduler is for.

    Raises:
        LaunchError: there are more processes or hosts than MPI knows: they would train alone, or do nothing.
    """
    if "RINGDANCE_JOB" in os.environ:
        return
    from ringdance.host.schedulers.detect import left_idle

    launched = size > 1 or any(name in os.environ for name in SIZE_NAMES)
    if not launched and os.environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        raise LaunchError(
            f"RANK={os.environ.get('RANK')} and WORLD_SIZE={os.environ['WORLD_SIZE']} are as torchrun sets "
            "them, whose processes MPI does not know: each would train alone. Start them with `ringdance run "
            f'-np N python SCRIPT`, or call init_process_group("ringdance") before hvd.init(). {_ONE_PROCESS}'
        )
    if found := left_idle(os.environ, launched):
        names = ", ".join(name for name, _ in found.hosts[:3]) + ", ..." * (len(found.hosts) > 3)
        raise LaunchError(
            f"{found.source} has {len(found.hosts)} host(s) for this job ({names}), but MPI knows of {size} "
            f"process(es), on {socket.gethostname()} only: the other hosts would do nothing, or train alone. "
            f"Start the script by {found.start}. {_ONE_PROCESS if size == 1 else ''}".rstrip()
        )


def _start_by(size: int, make: Callable[..., Transport], settings: Settings) -> Engine:
    _process.monitoring.prepare()
    transport = make(**_of_transport(settings, size))
    return Engine(transport, settings, report=_log.warning, ring=_process.monitoring.ring(settings))


def _of_transport(settings: Settings, size: int) -> dict[str, Any]:
    """Return what every transport is made with; ``size``: an upper bound of the number of ranks."""
    common = {name: getattr(settings, name) for name in _COMMON}
    # Not from the package's metadata: a source tree on PYTHONPATH has none.
    common["the version of ringdance"] = sys.modules["ringdance"].__version__
    return {
        "window_bytes": buffer_bytes(settings, tuned=True),
        "vector_bytes": vector_bytes(size, settings.cache_capacity), "common": common,
    }  # fmt: skip


def _export_ranks(found: Engine) -> None:
    """Set the variables in which scripts read their rank, as `ringdance run` does."""
    if not _process.mpi:
        return
    for name in RANK_VARIABLES:
        value = str(getattr(found, name.lower()))
        os.environ[f"RINGDANCE_{name}"] = os.environ[f"HOROVOD_{name}"] = value
    os.environ["HOROVOD_HOSTNAME"] = found.identity.host


def _mark_children(found: Engine, by_mpi: bool) -> None:
    """Tell the processes that this rank starts that they are not the rank, though they get its variables.

    Those that a launcher starts for a job of their own get other values of them.
    """
    if found.size > 1 or (by_mpi and _world_size(launched_size()) > 1):
        names = _OF_A_LAUNCH if by_mpi else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        place = found.rank, found.size, found.local_rank, found.local_size, found.cross_rank, found.cross_size
        noted = {"pid": os.getpid(), "place": place, "launch": {name: os.environ.get(name) for name in names}}
        os.environ[STARTED_BY] = json.dumps(noted)
    else:
        os.environ.pop(STARTED_BY, None)  # of an earlier init()


def _started_by() -> dict[str, Any] | None:
    """Return what the rank that has started this process has noted of itself, None if there is none."""
    noted: dict[str, Any] | None = json.loads(os.environ.get(STARTED_BY, "null"))
    if noted is None or noted["pid"] == os.getpid():
        return None
    return noted if all(os.environ.get(name) == value for name, value in noted["launch"].items()) else None


def _outside(noted: dict[str, Any], settings: Settings) -> Engine:
    """Return an engine that is in no job, and answers for the rank that has started this process."""
    rank, size, *place = noted["place"]
    found = Engine(OutsideTransport(rank, size, noted["pid"]), settings, threaded=False)
    found.local_rank, found.local_size, found.cross_rank, found.cross_size = place
    found.disown("was started by")
    return found


def _world_size(launched: int | None) -> int:
    """Return an upper bound of the job's size before MPI is up."""
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
