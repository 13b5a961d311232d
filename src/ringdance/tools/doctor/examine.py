"""Collect facts about hosts and apply checks to these facts.

Each host's agent runs the probes in a separate process (``probe.py``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringdance.errors import LaunchError
from ringdance.tools.doctor import disk, gpu, leftovers, machine, mpi, network, python
from ringdance.tools.doctor.check import (
    AREAS,
    Check,
    Facts,
    Finding,
    HostFacts,
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
"""All checks by name, sorted by area in the order of ``AREAS``."""
_SPARE_S = 30.0  # added to the probes' time limit, to allow for starting Python
_NAMES = 16  # number of other host names that each host must resolve
# Variables that locate libraries. Ranks inherit these variables from the launcher, not from a login shell.
_LIBRARIES = (
    "LD_LIBRARY_PATH", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "I_MPI_ROOT", "MPI4PY_LIBMPI", "MPI4PY_MPIABI",
)  # fmt: skip


def collect(
    hosts: HostSet, probes: Collection[str], usage: Usage, seconds: float
) -> dict[str, dict[str, Any]]:
    """Collect facts on all hosts in parallel. If a host does not answer, its only fact is "reach".

    Args:
        hosts: The hosts, some of which may not be connected.
        probes: Names of the probes to run.
        usage: How the hosts will be used.
        seconds: Time limit for the probes on each host.
    """
    request = {
        "probes": list(probes),
        "seconds": seconds,
        "environ": {name: os.environ[name] for name in _LIBRARIES if name in os.environ},
    }
    messages = {}
    for host in hosts.names:
        own = asdict(replace(usage, hosts=_sample(usage.hosts, host)))
        messages[host] = {
            "task": "run", "argv": ["ringdance.tools.doctor.probe"], "mark": MARK,
            "input": json.dumps({**request, "usage": own}),
        }  # fmt: skip
    answers = hosts.ask(messages, timeout=seconds + _SPARE_S)
    return {host: _facts(hosts, host, answer) for host, answer in answers.items()}


def _sample(hosts: Sequence[str], host: str) -> tuple[str, ...]:
    """Return the hosts whose names ``host`` must resolve: ``host`` itself and the next ``_NAMES`` hosts."""
    at = hosts.index(host) if host in hosts else 0
    return tuple([*hosts, *hosts][at : at + min(len(hosts), _NAMES + 1)])


def _facts(hosts: HostSet, host: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the facts about a host from its agent's answer."""
    local, output = host in hosts.shell.local, answer.get("output", "")
    try:
        facts = json.JSONDecoder().raw_decode(output.rpartition(MARK)[2])[0]
    except ValueError:
        reason = answer["problem"] or f"the probes failed: {last_line(output)}"
        error = hosts.problems.get(host, LaunchError(reason))
        way = "" if local else f"ssh {host} "
        fix = error.fix or f"see the full output of: {way}{sys.executable} -m ringdance doctor"
        return {"reach": {"error": error.problem, "fix": fix}}
    return {**facts, "reach": {"error": "", "local": local}}


def examine(facts: Mapping[str, Facts], usage: Usage, names: Iterable[str] | None = None) -> list[Result]:
    """Apply checks to the facts about one or more hosts.

    Args:
        facts: Facts by host name.
        usage: How the hosts will be used.
        names: Names of the checks to apply. If None, all checks whose probes were run are applied.
    """
    hosts = {name: HostFacts(known, usage.slots.get(name, 0)) for name, known in facts.items()}
    merged: dict[Result, list[str]] = {}  # merges results that differ only in their hosts
    for check in CHECKS.values():
        if names is None or check.name in names:
            for result in _compared(check, hosts) if check.compares else _each(check, hosts):
                merged.setdefault(replace(result, hosts=()), []).extend(result.hosts)
    return [replace(result, hosts=tuple(on)) for result, on in merged.items()]


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


def _failure(check: Check, host: HostFacts) -> str | None:
    """Return why a required probe failed, "" if one was not run, or None if all of them succeeded."""
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
