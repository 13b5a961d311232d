"""Start or restart a job with MPI: wait for all ranks, compare settings and create the transport."""

from __future__ import annotations

import operator
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ringdance.core.transport.base import Identity
from ringdance.core.transport.eventcount import process_state
from ringdance.core.transport.library import load_mpi
from ringdance.core.transport.missing_ranks import missing_rank_report, waiting_in_init
from ringdance.core.transport.mpi import (
    MpiTransport,
    free_shared_memory,
    gather,
    has_room,
    lost_in_start,
    translated,
)
from ringdance.errors import ArgumentError, RankLostError, SettingError


def world_transport(
    comm: Any = None, *, window_bytes: int, vector_bytes: int, common: dict[str, Any], least_bytes: int = 0,
    timeout: float = 30.0, threads: bool = True,
) -> MpiTransport:
    """Initialize MPI if necessary and return the transport of the whole job.

    Args:
        comm: None for all processes, a list of ranks in MPI.COMM_WORLD, or an mpi4py communicator.
        window_bytes: Size of each rank's buffers in a host's window, or 0 for no window.
        vector_bytes: Length of the longest agreement vector.
        common: Values by name. Each must be equal on all ranks.
        least_bytes: Size to use on all ranks instead of ``window_bytes`` if a host lacks room for the latter.
            0 to keep ``window_bytes``.
        timeout: Seconds after which a warning says which ranks are missing.
        threads: If True, request multithreading support from MPI.

    Raises:
        ArgumentError: ``comm`` is of another type, or does not contain this process.
        LaunchError: MPI cannot be loaded.
        SettingError: A value in ``common`` differs between ranks. Raised on all ranks.
    """
    with waiting_in_init(timeout, _expected(comm)):
        mpi = load_mpi("multiple" if threads else "single")
        chosen = _choose(mpi, comm)
        with lost_in_start(chosen):
            everyone = gather(chosen, [socket.gethostname(), common, free_shared_memory()])
            check_common([(host, values) for host, values, _ in everyone])
            if not window_fits([(host, free) for host, _, free in everyone], vector_bytes, window_bytes):
                window_bytes = least_bytes or window_bytes
            return MpiTransport(mpi, chosen, range(1 << 30), window_bytes, vector_bytes)


def wait_for_restart(comm: Any, peers: Sequence[Identity], timeout: float, limit: float) -> None:
    """Wait until all ranks of a job that has ended are ready to restart it.

    Args:
        comm: The ``comm`` argument of ``world_transport``. If it is a list of ranks, return without waiting.
        peers: Ranks of the ended job.
        timeout: Seconds after which a warning says which ranks are missing.
        limit: Maximum seconds to wait.

    Raises:
        RankLostError: A rank on this host has exited, or not all ranks were ready within ``limit``.
    """
    from mpi4py import MPI

    where = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(where, MPI.Comm):
        return
    here, ranks = socket.gethostname(), _expected(comm)
    with waiting_in_init(timeout, ranks):
        arrived = where.Ibarrier()
        began = checked = time.monotonic()
        backoff = 1e-4
        while not arrived.Test():
            now = time.monotonic()
            if now > checked + 0.1:
                checked = now
                gone = [who for who in peers if who.host == here and process_state(who.pid) == "gone"]
                if gone:
                    raise RankLostError(f"The job cannot restart because {gone[0]} has exited.")
            if now > began + limit:
                raise RankLostError(
                    f"The job cannot restart because some of its {len(peers)} ranks were not ready within "
                    f"{limit:g} s (elastic_timeout). {missing_rank_report(ranks, limit)}"
                )
            time.sleep(backoff)
            backoff = min(2 * backoff, 0.02)


def _expected(comm: Any) -> list[int]:
    """Return the launcher's ranks that form the job, or an empty list if all of them do."""
    if comm is None:
        return []
    if not hasattr(comm, "Get_group"):
        return rank_list(comm)
    from mpi4py import MPI

    return translated(comm.Get_group(), MPI.COMM_WORLD)


def check_common(everyone: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raise SettingError if a value differs between ranks. ``everyone`` has each rank's host and values."""
    host, first = everyone[0]
    for rank, (other_host, other) in enumerate(everyone):
        for name, value in first.items():
            if other.get(name) != value:
                raise SettingError(
                    f"{name} must be the same on all ranks: it is {value!r} on rank 0 (host {host}) and "
                    f"{other.get(name)!r} on rank {rank} (host {other_host}). Compare `ringdance settings "
                    "--changed` and `ringdance --version` on both hosts. All ranks need the same environment."
                )


def window_fits(everyone: Sequence[tuple[str, int]], vector_bytes: int, window_bytes: int) -> bool:
    """Return True if all hosts have room for their windows. ``everyone``: each rank's host and free bytes."""
    counts = Counter(host for host, _ in everyone)
    return all(has_room(free, counts[host], vector_bytes, window_bytes) for host, free in everyone)


def rank_list(comm: Any) -> list[int]:
    """Return ``comm`` as a list of ranks. Raises ArgumentError if it is not one."""
    try:
        return [operator.index(rank) for rank in comm]
    except TypeError:
        raise ArgumentError(
            f"init(comm=…): expected a list of ranks or an mpi4py communicator, but got {comm!r}."
        ) from None


def _choose(mpi: Any, comm: Any) -> Any:
    world = mpi.COMM_WORLD
    if isinstance(comm, mpi.Comm):
        return comm.Dup()
    ranks = [] if comm is None else rank_list(comm)
    if not ranks:
        return world.Dup()
    if world.Get_rank() not in ranks:
        raise ArgumentError(
            f"init(comm={ranks}): this process is rank {world.Get_rank()} of {world.Get_size()}, which is "
            "not in the list. Call init() only on the ranks that form the job."
        )
    if len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= world.Get_size():
        raise ArgumentError(
            f"init(comm={ranks}): the ranks must be distinct, not negative, and below {world.Get_size()}."
        )

    return world.Create_group(world.Get_group().Incl(ranks))
