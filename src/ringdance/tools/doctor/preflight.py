"""Quick checks of a job's hosts before its ranks start. The job's agents run the probes."""

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
from ringdance.tools.doctor.examine import collect, examine
from ringdance.tools.doctor.probe import QUICK
from ringdance.tools.hosts.host_set import HostSet

if TYPE_CHECKING:
    from ringdance.launch.prepare import PreparedJob

_PROBES_S, _CONNECT_S = 30.0, 20.0
# Checks whose errors are reported as warnings before a job. Either the job may run despite the error (host
# names may be aliases that only ssh resolves, output is written on the launcher's host, and the launcher's
# directories have short paths), or the cause may be intentional (a user's own module).
_WARNINGS = frozenset(
    {"own-name", "names-agree", "folder-writable", "temporary-path-length", "shadowed-modules"}
)


def check_hosts(ready: PreparedJob, report: Callable[[str], None], *, required: bool = True) -> None:
    """Check the hosts of a job that is about to start. All warnings are reported in a single line.

    Args:
        ready: The prepared job.
        report: Called with each line to show to the user.
        required: If True, errors raise LaunchError. Otherwise they are passed to ``report``.

    Raises:
        LaunchError: The job would fail. No ranks are started, and the agents are closed.
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
            raise LaunchError(
                "cannot start:\n  " + "\n  ".join(lines) + "\n(to start anyway, pass --no-check)"
            )
    except BaseException:
        ready.close()
        raise
    for line in lines:
        report(line)
    warnings = list(dict.fromkeys(result.check for result in wrong if result.severity == WARNING))
    if warnings:
        named = hosts_text([(host.name, len(host.ranks)) for host in ready.plan.hosts])
        report(
            f"checks found problems that may slow down or end the job: {several(warnings, 6)}. "
            f"To see the fixes, run: ringdance doctor --quick -H {named}"
        )


def preflight(ready: PreparedJob) -> list[Result]:
    """Return the problems on a job's hosts, errors first. The job's agents run the probes and stay alive."""
    slots = {host.name: len(host.ranks) for host in ready.plan.hosts}
    directories = [os.path.abspath(ready.spec.output_directory)] if ready.spec.output_directory else []
    usage = Usage(slots, tuple(directories), tuple(slots), os.getcwd())
    local = frozenset(host.name for host in ready.plan.hosts if host.local)
    remotes = {agent.host: agent for agent in ready.remotes}
    hosts = HostSet(slots, replace(ready.spec.shell, local=local), dict(remotes))
    try:
        hosts.connect(_CONNECT_S, lambda text: None)  # all hosts except this one already have agents
        facts = collect(hosts, QUICK, usage, _PROBES_S)
    finally:
        close_all(agent for host, agent in hosts.agents.items() if host not in remotes)
    wrong = [
        replace(result, severity=WARNING)
        if result.severity == ERROR and result.check in _WARNINGS
        else result
        for result in examine(facts, usage)
        if result.wrong and result.check != "folder-exists"  # the job will create missing directories
    ]
    return sorted(wrong, key=lambda result: result.severity != ERROR)
