"""Join and leave the job, and query ranks, sizes and Horovod's build flags."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ringdance.core.recorder import StepMark
from ringdance.errors import ArgumentError, MismatchError
from ringdance.training import handles, session
from ringdance.training.objects import allgather_json
from ringdance.training.process_sets import ProcessSet, bind, ranks_of
from ringdance.training.session import is_initialized, shutdown

__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mark_step", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size",
]

_log = logging.getLogger("ringdance")


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Join the job. Return once all ranks have joined.

    If this process is already in a job, only bind ``process_sets`` to the sets registered in the job.

    Args:
        comm: ``None`` for the whole job, a list of ranks in MPI_COMM_WORLD, or an mpi4py communicator. With a
            list or communicator, only its processes may call ``init``, and all must pass the ranks in
            the same order.
        process_sets: Sets to register. They get the ids 1, 2, ... in this order.
            ``"dynamic"`` is accepted, but has no effect: sets can always be added later.

    Raises:
        ArgumentError: Two sets are equal, a set equals the global set, or the sets differ between ranks.
            Raised on all ranks. Even so, this process has joined the job, and may call ``init`` again with
            different sets.
        KeyError: The job already has process sets, but none with the same ranks as a set in ``process_sets``.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ArgumentError(
                f"process_sets={process_sets!r} must be a list of ProcessSet objects, or 'dynamic'."
            )
        process_sets = None
    sets = list(process_sets or ())
    if not all(isinstance(item, ProcessSet) for item in sets):
        raise ArgumentError(f"process_sets={sets!r}: every element must be a ProcessSet.")
    again = session.is_initialized()
    session.init(comm)
    if not again:
        handles.clear()
        if session.engine().closed:  # This process was started by a rank and is not part of the job.
            return
    # The first call registers even an empty list: if another rank passes sets, all ranks must get the error.
    # If the first list was rejected, no sets exist yet, so a later call may pass another list.
    if not again or (sets and len(session.engine().process_sets()) == 1):
        _register_sets(sets)
        session.engine().recorder.uncounted()
    else:
        bind(sets)


class SetsDifferError(MismatchError, ArgumentError):
    """The process sets passed to ``init`` differ between ranks. Also a ValueError, like ``ArgumentError``."""


def _register_sets(process_sets: list[ProcessSet]) -> None:
    """Register the sets passed to ``init``, with the ids 1, 2, ... in order. A collective call on all ranks.

    Sets made from communicators may differ between ranks (as after ``Split``). They are registered after the
    other sets, sorted by their ranks.

    Raises:
        ArgumentError: On any rank, a set equals another set or the global set, or has ranks out of range.
        SetsDifferError: The lists differ between ranks.
    """
    engine = session.engine()
    rank_lists: list[tuple[int, ...]] = []
    problem = None
    try:
        rank_lists = [ranks_of(process_set) for process_set in process_sets]
        for index, ranks in enumerate(rank_lists):
            engine.sets.check_new(ranks)
            if ranks in rank_lists[:index]:
                raise ArgumentError(f"Process sets must differ, but {list(ranks)} is listed twice.")
    except ArgumentError as error:
        problem = str(error)
    listed = [ranks for ranks, item in zip(rank_lists, process_sets, strict=False) if item.mpi_comm is None]
    everywhere = allgather_json([problem, listed, rank_lists], "init.process_sets")
    for rank, (wrong, theirs, _) in enumerate(everywhere):
        if wrong is None and theirs == everywhere[0][1]:
            continue
        for process_set in process_sets:
            process_set.process_set_id = None
        if wrong is not None:
            raise ArgumentError(f"init(process_sets=...) on rank {rank} ({engine.hosts[rank]}): {wrong}")
        raise SetsDifferError(
            f"init(process_sets=...) differs between ranks: rank 0 ({engine.hosts[0]}) passed "
            f"{everywhere[0][1]}, rank {rank} ({engine.hosts[rank]}) passed {theirs}. Pass the same list on "
            "all ranks."
        )
    others = {tuple(ranks) for _, _, theirs in everywhere for ranks in theirs}.difference(listed)
    for ranks in [*listed, *sorted(others)]:
        engine.add_process_set(ranks)
    bind(process_sets)


def mark_step() -> None:
    """Mark the end of a training step for timelines, metrics and reports.

    Use this in scripts that reduce gradients by hand, or that use several optimizers in one step. After the
    first call, the optimizers no longer mark steps themselves. Does nothing outside a job.
    """
    session.mark_step(StepMark.SCRIPT)


def rank() -> int:
    """Return this process's rank in the job, from 0 to size - 1."""
    return session.engine().rank


def size() -> int:
    """Return the number of processes in the job."""
    return session.engine().size


def local_rank() -> int:
    """Return this process's rank among the processes on its host."""
    return session.engine().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return session.engine().local_size


def cross_rank() -> int:
    """Return this host's index among the hosts that run a process with the same local rank."""
    return session.engine().cross_rank


def cross_size() -> int:
    """Return the number of hosts that run a process with the same local rank."""
    return session.engine().cross_size


def is_homogeneous() -> bool:
    """Return True if every host runs the same number of processes."""
    return len(set(Counter(session.engine().hosts).values())) == 1


def mpi_threads_supported() -> bool:
    """Return True if the program may make its own MPI calls (with mpi4py) from any thread.

    Collectives can always be submitted from several threads.
    """
    return session.engine().transport.several_threads


def mpi_enabled() -> bool:
    """Return True if this process is in a job (all ranks are MPI processes)."""
    return session.is_initialized()


def mpi_built() -> bool:
    """Return True, because MPI is the transport between processes."""
    return True


def gloo_enabled() -> bool:
    """Return False, because MPI and shared memory are used instead of Gloo."""
    return False


def gloo_built() -> bool:
    """Return True if ``HOROVOD_RANK`` is set, as scripts expect under Gloo. Gloo itself is never used."""
    return "HOROVOD_RANK" in os.environ


def nccl_built() -> int:
    """Return 0, because this framework's GPU tensors do not use NCCL. Horovod also returns an integer."""
    return 0


def ddl_built() -> bool:
    """Return False, because DDL is never used."""
    return False


def ccl_built() -> bool:
    """Return False, because oneCCL is never used."""
    return False


def cuda_built() -> bool:
    """Return False, because no code here is compiled for CUDA."""
    return False


def rocm_built() -> bool:
    """Return False, because no code here is compiled for ROCm."""
    return False
