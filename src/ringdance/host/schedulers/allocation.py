"""The hosts that a scheduler has allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringdance.host.schedulers.hostfile import HostList

CONTAINERS_START_S = 300.0
"""Seconds until the containers of one job, which do not all start at the same time, answer."""


@dataclass(frozen=True)
class Allocation:
    """Hosts allocated by a scheduler.

    Attributes:
        hosts: names and slots.
        source: the scheduler, for messages.
        method: program that starts processes there: "ssh" or "srun".
        ssh_arguments: more arguments of ssh, as the scheduler sets them.
        start_timeout: seconds in which hosts may still be starting.
        refused: why this is not the host on which a job on all of them is started, or "".
        unattended: the scheduler has started this process for the job: it is no shell that a person uses, and
            no step for which one process was asked.
        maybe_outside: this host may be none of them, as the pod of an MPIJob's launcher.
        start: what starts a script on all of them.
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
