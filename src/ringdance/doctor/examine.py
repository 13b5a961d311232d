"""Collect facts of hosts and apply the checks to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ringdance.doctor import gather
from ringdance.doctor.check import Check, Facts, Finding, Host, Hosts, Outcome, Result, Usage
from ringdance.doctor.checks import CHECKS
from ringdance.hosts.host_set import HostSet


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
    facts = gather.collect(hosts, probes, usage, seconds)
    return facts, examine(facts, usage, names)


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
