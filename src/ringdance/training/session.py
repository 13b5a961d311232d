"""The engine of this process, from ``init()`` until Python exits.

Bindings and the training layer get the engine from ``engine()``. The modules that this one imports have no
global state.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringdance import settings as settings_module
from ringdance.core.engine import Engine
from ringdance.core.recorder import Profiler, StepMark
from ringdance.core.transport.base import Transport
from ringdance.core.transport.single import SingleTransport
from ringdance.errors import ArgumentError, NotInitializedError
from ringdance.training import startup
from ringdance.training.ending import Process

_process = Process()
_lock = threading.Lock()


def engine() -> Engine:
    """Return the engine of this process. Raises NotInitializedError if this process is not in a job."""
    active: Engine | None = _process.engine
    if active is None:
        raise NotInitializedError("Ringdance has not been initialized; call hvd.init() first.")
    return active


def is_initialized() -> bool:
    """Return True if this process has joined a job and has not left it."""
    return _process.engine is not None


def mark_step(mark: StepMark = StepMark.OPTIMIZER) -> None:
    """Count a step that ends at this point. Does nothing outside a job."""
    if (active := _process.engine) is not None:
        active.recorder.step(mark)
        if active.on_step is not None:
            active.on_step()


def add_profiler(profiler: Profiler) -> None:
    """Register a framework's profiler. While it is running, it also records waits."""
    at_init(lambda: engine().profilers.append(profiler))


def at_init(function: Callable[[], None]) -> None:
    """Call a function each time this process joins a job, and immediately if it is already in a job."""
    _process.at_init += (function,)
    if _process.engine is not None:
        function()


def note_unseen(error: Exception | None) -> None:
    """Record how the last exchange in a compiled program ended.

    The script may never see the error. In that case, this rank fails with it at exit.

    Args:
        error: Error with which the exchange failed, or None if it succeeded. Success clears an earlier error:
            nothing that depends on a failed program runs, so the script has continued after the error.
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
    """Return metrics of this rank. Can be called often, because it does not communicate.

    Returns:
        ``rank``, ``size``, ``host``; ``seconds`` since ``init()``; ``steps``; ``steps_per_second`` since the
        first step and ``recent_steps_per_second`` since the last call; ``exposed_seconds``, the time that
        training waited for results; ``exposed_share``, the same as a share of the time since the first step;
        ``recent_exposed_share``, this share since the last call; ``batches``, ``tensors`` and ``bytes``
        exchanged.

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
        mark_cycles: If True, also mark each round of agreement.

    Raises:
        NotInitializedError: ``init()`` has not been called.
        ArgumentError: The setting ``timeline`` is not set. Set it to "DYNAMIC" to use this function.
    """
    _process.monitor.start_timeline(engine(), os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline file. Raises NotInitializedError outside a job."""
    _process.monitor.stop_timeline(engine())


def pause_stall_check(what: str, timeout: float = 3600.0) -> contextlib.AbstractContextManager[None]:
    """Mark work that takes a long time on one rank: ``with hvd.pause_stall_check("evaluation"):``.

    While the block runs, no rank warns that it is waiting for this rank, or gives up after
    ``stall_shutdown_time``.

    Args:
        what: A word or two that describe the work, for warnings after ``timeout``.
        timeout: Maximum duration of the work in seconds.

    Raises:
        ArgumentError: ``timeout`` is not positive.
    """
    if not timeout > 0:
        raise ArgumentError(f"pause_stall_check(timeout={timeout!r}): timeout must be greater than 0.")
    return engine().pause_stall_check(str(what), timeout) if is_initialized() else contextlib.nullcontext()


def init(comm: Any = None, transport: tuple[int, Callable[..., Transport]] | None = None) -> None:
    """Join the job. All ranks must call this. Does nothing if this process is already in a job.

    Args:
        comm: None for all processes that the launcher started, a list of the ranks to include, or an
            mpi4py communicator. Without a launcher, ``[0]`` means a single process, even if a scheduler has
            allocated several hosts.
        transport: Number of ranks, and function that creates the transport. Needed if the ranks are not
            MPI processes. Reused by later calls.

    Raises:
        LaunchError: The launcher and the MPI library do not match, MPI is missing, or a scheduler
            has allocated several hosts to the job and this process is the only one.
        ArgumentError: ``comm`` has the wrong type, or does not include this process.
        NotInitializedError: ``transport`` was passed, but this process was started by a rank.
            Without ``transport``, such a process does not join a job: as in a forked process, ``rank()`` and
            ``size()`` work, but collectives raise this error.
    """
    with _lock:
        if is_initialized():
            return
        parent = startup.ParentRank.find()
        if parent is not None and (transport is None or parent.place["size"] > 1):
            outside = parent.outside_engine(settings_module.load())
            if transport is not None:
                raise outside.end.error()
            _process.engine = outside
        else:
            _join(comm, transport or _process.transport)
        for function in _process.at_init:
            function()


def _join(comm: Any, transport: tuple[int, Callable[..., Transport]] | None) -> None:
    """Join the job with the arguments of ``init``. The caller must hold ``_lock``."""
    if _process.mpi and _process.pid != os.getpid():
        raise NotInitializedError(
            f"This process (pid {os.getpid()}) was forked from a rank (pid {_process.pid}) and cannot "
            "join the job, because MPI does not survive a fork. Call init() only in the rank."
        )
    settings = settings_module.load()
    if "horovod" in sys.modules and settings.origin("deadlock_time") == "default":
        settings = replace(settings, deadlock_time=0.0)  # as in Horovod, which warns but waits forever
    startup.configure_log(settings)
    _process.transport = transport
    if transport is None:
        joined = startup.start_by_mpi(comm, settings, _process.monitor)
        _process.mpi |= not isinstance(joined.transport, SingleTransport)
    else:
        joined = startup.start_with(*transport, settings, _process.monitor)
    _process.engine = joined
    _process.comm, _process.unseen = comm, None
    with contextlib.suppress(OSError, KeyError):  # read by host/site/sitecustomize.py
        name = f"joined.{os.environ['RINGDANCE_RANK']}"
        open(os.path.join(os.environ["RINGDANCE_JOB_DIRECTORY"], name), "wb").close()
    _process.monitor.start(joined)
    _process.tuner = None
    if settings.autotune or settings.tuned:
        from ringdance.training.tuning.autotune import tuner_of

        _process.tuner = tuner_of(joined)
    if _process.mpi:
        startup.export_ranks(joined)
    startup.mark_children(joined, by_mpi=transport is None)
    if not _process.pid:
        _process.watch()
    _process.pid = os.getpid()


def shutdown() -> None:
    """Leave the job. All ranks stop, and operations that wait for this rank fail with ShutDownError."""
    engine_left = _leave()
    if engine_left is not None:
        if _process.pid == os.getpid():
            _process.show_summary(engine_left)
        _process.monitor.end(engine_left)


def _leave() -> Engine | None:
    with _lock:
        if _process.tuner is not None and _process.engine is not None:
            _process.tuner.restore()
        leaving, _process.engine = _process.engine, None
    if leaving is not None:
        _process.await_devices(leaving)
        _process.clean &= leaving.shutdown()
    return leaving


def regroup() -> Any:
    """Leave the job and wait until all ranks have called this.

    The job can be started again afterwards. This also works after the engine has failed, as long as all
    processes are alive.

    Returns:
        The ``comm`` argument of the last ``init``, for the next one.

    Raises:
        RankLostError: A process has exited, or did not call this within the time limit ``elastic_timeout``.
    """
    ended = engine()
    _leave()
    _process.monitor.end(ended)
    if _process.mpi and ended.size > 1:
        from ringdance.core.transport.world import wait_for_restart

        settings = ended.settings
        peers = ended.transport.identities
        wait_for_restart(_process.comm, peers, settings.init_timeout, settings.elastic_timeout)
        _process.clean = True  # all ranks have left the old job, even if it failed
    return _process.comm
