"""Detect which scheduler has allocated hosts to this process."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from ringdance.errors import LaunchError
from ringdance.host.schedulers import kubernetes, lsf, sagemaker, slurm
from ringdance.host.schedulers.allocation import Allocation
from ringdance.host.schedulers.this_machine import local_names


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """Return the hosts allocated to this process, None outside of any scheduler.

    Args:
        environ: environment of this process.

    Raises:
        LaunchError: a scheduler's variables cannot be parsed.
    """
    for read in (kubernetes.allocation, sagemaker.allocation, slurm.allocation, lsf.allocation):
        if found := read(environ):
            return found
    return None


def left_idle(environ: Mapping[str, str], launched: bool) -> Allocation | None:
    """Return the hosts that do nothing for a job whose ranks are all on this host, None if that may be meant.

    Args:
        environ: environment of a rank.
        launched: an MPI launcher has started it, on the hosts that it was given.
    """
    with suppress(LaunchError):
        found = detect(environ)
        if found is None or not found.unattended:
            return None
        if len(found.hosts) > 1 and not launched:
            return found
        names = [name for name, _ in found.hosts]
        own = {socket.gethostname().partition(".")[0]}
        if found.maybe_outside and own.isdisjoint(name.partition(".")[0] for name in names):
            return None if local_names(names) else found
    return None
