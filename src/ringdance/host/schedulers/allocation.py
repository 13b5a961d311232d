"""The hosts that a scheduler has allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringdance.host.schedulers.hostfile import HostList

CONTAINERS_START_S = 300.0
"""Seconds within which all containers of a job must answer. Some start later than others."""


@dataclass(frozen=True)
class Allocation:
    """Hosts allocated by a scheduler.

    Attributes:
        hosts: Each host's name and number of slots.
        source: Name of the scheduler, for messages.
        method: Program that starts processes on the hosts: "ssh" or "srun".
        ssh_arguments: Further arguments for ssh, set by the scheduler.
        start_timeout: Number of seconds for which hosts may still be starting.
        refused: Why a job on all hosts must not be started from this host, or "" if it may be started.
        unattended: True if the scheduler started this process for the job. False in a user's shell, and in a
            step for which a number of processes was requested.
        maybe_outside: True if this host may not be one of ``hosts``, such as the pod of an MPIJob's launcher.
        start: Command or option that starts a script on all hosts, for messages.
    """

    hosts: HostList
    source: str
    method: str = "ssh"
    ssh_arguments: Sequence[str] = ()
    start_timeout: float = 0.0
    refused: str = ""
    unattended: bool = True
    maybe_outside: bool = False
    start: str = "`ringdance run python SCRIPT`"
