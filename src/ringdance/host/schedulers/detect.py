"""Detect which scheduler has allocated hosts to this process."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from ringdance.errors import LaunchError
from ringdance.host.schedulers import kubernetes, lsf, sagemaker, slurm
from ringdance.host.schedulers.allocation import Allocation
from ringdance.host.schedulers.this_machine import local_names

_SCHEDULERS = (kubernetes, sagemaker, slurm, lsf)
STAYS = "|".join(scheduler.STAYS for scheduler in _SCHEDULERS if scheduler.STAYS)
"""Pattern for the names of scheduler variables that are not forwarded to other hosts."""


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """Return the hosts allocated to this process, or None if no scheduler is in use.

    Args:
        environ: Environment of this process.

    Raises:
        LaunchError: A scheduler's variables cannot be parsed.
    """
    for scheduler in _SCHEDULERS:
        if allocation := scheduler.allocation(environ):
            return allocation
    return None


def left_idle(environ: Mapping[str, str], launched: bool) -> Allocation | None:
    """Return the allocation that a job leaves idle by running all its ranks on this host.

    Returns None if no hosts are idle, or if leaving them idle may be intended.

    Args:
        environ: Environment of a rank.
        launched: True if an MPI launcher started the rank, on the hosts that were passed to it.
    """
    with suppress(LaunchError):
        allocation = detect(environ)
        if allocation is None or not allocation.unattended:
            return None
        if len(allocation.hosts) > 1 and not launched:
            return allocation
        names = [name for name, _ in allocation.hosts]
        own = {socket.gethostname().partition(".")[0]}
        if allocation.maybe_outside and own.isdisjoint(name.partition(".")[0] for name in names):
            return None if local_names(names) else allocation
    return None
