"""The checks before a job starts: quick ones, by the job's own agents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import hosts_text
from ringdance.launch.hosts import several
from ringdance.launch.remote.connect import close_all
from ringdance.tools.doctor.check import ERROR, WARNING, Result, Usage
from ringdance.tools.doctor.examine import inspect
from ringdance.tools.doctor.probe import QUICK
from ringdance.tools.hosts.host_set import HostSet

if TYPE_CHECKING:
    from ringdance.launch.prepare import PreparedJob

_PROBES_S, _CONNECT_S = 30.0, 20.0
# Warnings only: the launcher needs none of it (hosts may have names that only ssh resolves, output is written
# on the launcher's host, its directories have short paths), or it may be intended (a user's own module).
_WARNINGS = frozenset(
    {"own-name", "names-agree", "folder-writable", "temporary-path-length", "shadowed-modules"}
)


def check_hosts(ready: PreparedJob, report: Callable[[str], None], *, required: bool = True) -> None:
    """Check the hosts of a job that is about to start; name warnings in one line.

    Args:
        ready: the job.
        report: called with each line for the user.
        required: whether errors are raised; else they are passed to `report`.

    Raises:
        LaunchError: the job would fail; nothing was started, and the agents were closed.
    """
    try:
        wrong = preflight(ready)
        lines = [
            f"host{'s' * (len(result.hosts) > 1)} {', '.join(result.hosts)}: {result.text}\n"
            f"    fix: {result.fix}"
            for result in wrong
            if result.severity == ERROR
        ]
        if lines and required:
            raise LaunchError("cannot start:\n  " + "\n  ".join(lines) + "\n(--no-check starts nevertheless)")
    except BaseException:
        ready.close()
        raise
    for line in lines:
        report(line)
    warnings = list(dict.fromkeys(result.check for result in wrong if result.severity == WARNING))
    if warnings:
        named = hosts_text([(host.name, len(host.ranks)) for host in ready.plan.hosts])
        report(
            f"may slow the job down or end it: {several(warnings, 6)}; "
            f"for the fixes: ringdance doctor --quick -H {named}"
        )


def preflight(ready: PreparedJob) -> list[Result]:
    """Return what is wrong with the hosts of a job, errors first. Its agents run the probes, and stay."""
    slots = {host.name: len(host.ranks) for host in ready.plan.hosts}
    directories = [os.path.abspath(ready.spec.output_directory)] if ready.spec.output_directory else []
    usage = Usage(slots, tuple(directories), tuple(slots), os.getcwd())
    local = frozenset(host.name for host in ready.plan.hosts if host.local)
    remotes = {agent.host: agent for agent in ready.remotes}
    hosts = HostSet(slots, replace(ready.spec.shell, local=local), dict(remotes))
    try:
        hosts.connect(_CONNECT_S, lambda text: None)  # this one: its agent starts with the job
        _, results = inspect(hosts, usage, QUICK, _PROBES_S)
    finally:
        close_all(agent for host, agent in hosts.agents.items() if host not in remotes)
    wrong = [
        replace(result, severity=WARNING)
        if result.severity == ERROR and result.check in _WARNINGS
        else result
        for result in results
        if result.wrong and result.check != "folder-exists"  # a job makes it
    ]
    return sorted(wrong, key=lambda result: result.severity != ERROR)
