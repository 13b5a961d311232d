"""Start and stop, rank and size, and what Horovod's scripts ask about the build."""

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
    """Join the job; return when all ranks have. In a job already, only bind the process sets.

    Args:
        comm: ``None`` for the whole job, ranks of MPI_COMM_WORLD, or an mpi4py communicator. Only the
            processes in it may call then, with ranks in the same order.
        process_sets: sets that exist from the start; they get the ids 1, 2, ... in this order.
            ``"dynamic"`` is accepted: sets can always be added later here.

    Raises:
        ArgumentError: sets are equal to one another or to the global set, or differ between ranks; raised
            on all ranks. This process has joined then, and may call again with other ones.
        KeyError: in a job that has sets already, none has the ranks of one that is given.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ArgumentError(f"process_sets={process_sets!r}: give a list of ProcessSet, or 'dynamic'.")
        process_sets = None
    given = list(process_sets or ())
    if not all(isinstance(one, ProcessSet) for one in given):
        raise ArgumentError(f"process_sets={given!r}: every element must be a ProcessSet.")
    again = session.is_initialized()
    session.init(comm)
    if not again:
        handles.clear()
        if session.engine().closed:  # in a process that a rank has started, which has no part in its job
            return
    # The first time also without sets: another rank may have given some, and has to get the error.
    # After a first init whose list was refused there are no sets yet: another list is accepted then.
    if not again or (given and len(session.engine().process_sets()) == 1):
        _register_sets(given)
        session.engine().recorder.uncounted()
    else:
        bind(given)


class SetsDifferError(MismatchError, ArgumentError):
    """The process sets given to ``init`` differ between ranks; a ValueError, as init's others are."""


def _register_sets(process_sets: list[ProcessSet]) -> None:
    """Register the sets given to ``init``: ids 1, 2, ... in their order. Collective over all ranks.

    Sets made from communicators may be different ones on each rank (as from ``Split``); they
    come after the others, ordered by their ranks.

    Raises:
        ArgumentError: on any rank, sets are equal to one another or to the global set, or out of range.
        SetsDifferError: lists differ between ranks.
    """
    engine = session.engine()
    given: list[tuple[int, ...]] = []
    problem = None
    try:
        given = [ranks_of(one) for one in process_sets]
        for index, ranks in enumerate(given):
            engine.sets.check_new(ranks)
            if ranks in given[:index]:
                raise ArgumentError(f"Process sets must differ; given twice: {list(ranks)}.")
    except ArgumentError as error:
        problem = str(error)
    listed = [ranks for ranks, one in zip(given, process_sets, strict=False) if one.mpi_comm is None]
    everywhere = allgather_json([problem, listed, given], "init.process_sets")
    for rank, (wrong, theirs, _) in enumerate(everywhere):
        if wrong is None and theirs == everywhere[0][1]:
            continue
        for one in process_sets:
            one.process_set_id = None
        if wrong is not None:
            raise ArgumentError(f"init(process_sets=...) on rank {rank} ({engine.hosts[rank]}): {wrong}")
        raise SetsDifferError(
            f"init(process_sets=...) differs between ranks: rank 0 ({engine.hosts[0]}) has "
            f"{everywhere[0][1]}, rank {rank} ({engine.hosts[rank]}) has {theirs}. Give all the same."
        )
    others = {tuple(ranks) for _, _, theirs in everywhere for ranks in theirs}.difference(listed)
    for ranks in [*listed, *sorted(others)]:
        engine.add_process_set(ranks)
    bind(process_sets)


def mark_step() -> None:
    """Mark the end of a training step, for timelines, metrics and reports.

    For scripts that reduce gradients by hand, or in which several optimizers make one step. From the first
    call on the optimizers' own marks do not count. Without a job it does nothing.
    """
    session.mark_step(StepMark.SCRIPT)


def rank() -> int:
    """Return this process's rank in the job, 0 to size - 1."""
    return session.engine().rank


def size() -> int:
    """Return the number of processes in the job."""
    return session.engine().size


def local_rank() -> int:
    """Return this process's rank among those on its host."""
    return session.engine().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return session.engine().local_size


def cross_rank() -> int:
    """Return this host's number among those that have a process with this local rank."""
    return session.engine().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    return session.engine().cross_size


def is_homogeneous() -> bool:
    """Return whether every host runs the same number of processes."""
    return len(set(Counter(session.engine().hosts).values())) == 1


def mpi_threads_supported() -> bool:
    """Return whether the program may use MPI itself (with mpi4py) from any thread.

    Submitting from several threads is always possible.
    """
    return session.engine().transport.several_threads


def mpi_enabled() -> bool:
    """Return whether this process is in a job (ranks are processes of MPI)."""
    return session.is_initialized()


def mpi_built() -> bool:
    """Return True: MPI is the transport between processes."""
    return True


def gloo_enabled() -> bool:
    """Return False: gloo is not used; MPI and shared memory do its work."""
    return False


def gloo_built() -> bool:
    """Return whether this process has ``HOROVOD_RANK``, which scripts take for gloo's; gloo is not used."""
    return "HOROVOD_RANK" in os.environ


def nccl_built() -> int:
    """Return 0: NCCL is used for PyTorch's tensors only (``ringdance.torch``). Scripts compare the number."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: nothing here is compiled for CUDA."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
