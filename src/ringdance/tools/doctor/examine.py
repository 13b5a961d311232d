"""Collect facts of hosts and apply the checks to them.

The agent on each host runs the probes in a process of its own (``probe.py``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringdance.launch.remote.shell import RemoteShell
from ringdance.tools.doctor import disk, gpu, leftovers, machine, mpi, network, python
from ringdance.tools.doctor.check import (
    AREAS,
    Check,
    Facts,
    Finding,
    Host,
    Hosts,
    Outcome,
    Result,
    Usage,
    last_line,
)
from ringdance.tools.doctor.probe import MARK
from ringdance.tools.hosts.host_set import HostSet

_ALL = [check for module in (machine, network, python, mpi, disk, gpu, leftovers) for check in module.CHECKS]
CHECKS = {check.name: check for check in sorted(_ALL, key=lambda check: AREAS.index(check.area))}
"""Every check by name, in the order of the areas."""
_SPARE_S = 30.0  # for starting Python, beyond the limit of the probes
_NAMES = 16  # of other hosts, that a host resolves
# Where libraries are: a job's ranks get these of the launcher's, whatever a host's own login sets.
_LIBRARIES = (
    "LD_LIBRARY_PATH", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "I_MPI_ROOT", "MPI4PY_LIBMPI", "MPI4PY_MPIABI",
)  # fmt: skip


def inspect(
    hosts: HostSet,
    usage: Usage,
    probes: Collection[str],
    seconds: float,
    names: Iterable[str] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[Result]]:
    """Run probes on hosts and apply the checks.

    Args:
        hosts: Connected hosts.
        usage: What they are to be used for.
        probes: Names of the probes.
        seconds: Limit for the probes of a host.
        names: Names of the checks; None for all.

    Returns:
        The facts by host, and the results.
    """
    facts = collect(hosts, probes, usage, seconds)
    return facts, examine(facts, usage, names)


def collect(
    hosts: HostSet, probes: Collection[str], usage: Usage, seconds: float
) -> dict[str, dict[str, Any]]:
    """Return the facts of each host, of all at once; only "reach" of one that does not answer.

    Args:
        hosts: Connected hosts, and the problems of the others.
        probes: Names of the probes.
        usage: What the hosts are to be used for.
        seconds: Limit for the probes.
    """
    request = {
        "probes": list(probes),
        "seconds": seconds,
        "environ": {name: os.environ[name] for name in _LIBRARIES if name in os.environ},
    }
    messages = {}
    for host in hosts.names:
        own = asdict(replace(usage, hosts=_sample(usage.hosts, host)))
        messages[host] = {"task": "probe", "request": {**request, "usage": own}}
    answers = hosts.ask(messages, timeout=seconds + _SPARE_S)
    return {host: _facts(host, answer, hosts.shell) for host, answer in answers.items()}


def _sample(hosts: Sequence[str], host: str) -> tuple[str, ...]:
    """Return the names that a host resolves: those after its own, so that several hosts resolve each."""
    at = hosts.index(host) if host in hosts else 0
    return tuple([*hosts, *hosts][at : at + min(len(hosts), _NAMES + 1)])


def _facts(host: str, answer: Mapping[str, Any], shell: RemoteShell) -> dict[str, Any]:
    """Return the facts in the answer of a host's agent."""
    output = answer.get("output", "")
    try:
        found = json.JSONDecoder().raw_decode(output.rpartition(MARK)[2])[0]
    except ValueError:
        # The launcher's messages end with the fix, in a sentence of its own.
        problem, dot, fix = answer["problem"].rpartition(". ")
        way = "" if host in shell.local else f"ssh {host} "
        fix = fix if dot else f"see what it says: {way}{sys.executable} -m ringdance doctor"
        error = problem or answer["problem"] or f"the probes fail: {last_line(output)}"
        return {"reach": {"error": error, "fix": fix}}
    return {**found, "reach": {"error": "", "local": host in shell.local}}


def examine(facts: Mapping[str, Facts], usage: Usage, names: Iterable[str] | None = None) -> list[Result]:
    """Apply checks to the facts of one or several hosts.

    Args:
        facts: by the hosts' names.
        usage: what they are to be used for.
        names: of the checks; None for all whose probes were run.
    """
    hosts = {name: Host(found, usage, usage.slots.get(name, 0)) for name, found in facts.items()}
    found: list[Result] = []
    for check in CHECKS.values():
        if names is None or check.name in names:
            found += _merged(_compared(check, hosts) if check.compares else _each(check, hosts))
    return found


def _each(check: Check, hosts: Hosts) -> Iterable[Result]:
    for name, host in hosts.items():
        failure = _failure(check, host)
        if failure is None:
            for finding in _listed(check.judge(host)):
                yield _result(check, finding, (name,))
        elif failure:
            yield Result(check.name, check.area, "unknown", (name,), failure)


def _compared(check: Check, hosts: Hosts) -> Iterable[Result]:
    known = {name: host for name, host in hosts.items() if _failure(check, host) is None}
    if len(known) > 1:
        for finding in _listed(check.judge(known)):
            yield _result(check, finding, finding.hosts or tuple(known))


def _failure(check: Check, host: Host) -> str | None:
    """Return why a probe that the check needs has no facts; "" if it was not run, None if all have."""
    for probe in check.needs:
        if probe not in host.facts:
            return ""
        if "failed" in host[probe]:
            return f"could not be checked: {host[probe]['failed']}"
    return None


def _listed(outcome: Outcome) -> list[Finding]:
    if outcome is None or isinstance(outcome, Finding):
        return [outcome] if outcome else []
    return list(outcome) or [Finding("no problem found")]


def _result(check: Check, finding: Finding, hosts: tuple[str, ...]) -> Result:
    severity = (finding.severity or check.severity) if finding.fix else "ok"
    return Result(check.name, check.area, severity, hosts, finding.text, finding.fix)


def _merged(results: Iterable[Result]) -> list[Result]:
    """Merge equal results of several hosts into one."""
    hosts: dict[Result, list[str]] = {}
    for result in results:
        hosts.setdefault(replace(result, hosts=()), []).extend(result.hosts)
    return [replace(result, hosts=tuple(names)) for result, names in hosts.items()]
