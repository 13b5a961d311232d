"""What a check is, the list of all of them, and how they are applied to facts.

A check is a pure function of facts. It returns what it found: a :class:`Finding`, several, or None where it
does not apply (no GPU, no Slurm). A finding is wrong if it has a line that mends it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]
"""What one host's probes found, by the probe's name; ``{"failed": REASON}`` where a probe could not look."""

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""A job fails or its result is wrong; it is slow or at risk; worth knowing."""

AREAS = (
    "hosts", "network", "python", "frameworks", "mpi", "environment", "cpu", "memory", "limits", "disk",
    "gpu", "leftovers",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What the machines are to be used for.

    Attributes:
        slots: ranks on each host by its name; empty if not known.
        folders: folders for logs and checkpoints.
        hosts: names of all hosts; empty for this machine alone.
        here: the folder in which the command will run.
        marks: files that the leader has just written into `folders`, to see whether all hosts see them.
    """

    slots: Mapping[str, int] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    here: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a check found, in one sentence.

    Attributes:
        text: the sentence; without the host's name, unless several hosts are compared.
        mend: the one line that mends it; empty if nothing is wrong.
        severity: in place of the check's own.
        hosts: those that it is about, where hosts are compared; empty for all.
    """

    text: str
    mend: str = ""
    severity: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether there is something to mend."""
        return bool(self.mend)


@dataclass(frozen=True)
class Case:
    """One host's facts as a check sees them.

    Attributes:
        facts: by probe.
        wanted: what the machine is to be used for.
        slots: ranks on this host, or 0 if not known.
    """

    facts: Facts
    wanted: Wanted = Wanted()
    slots: int = 0

    def __getitem__(self, probe: str) -> Any:
        return self.facts[probe]

    def variable(self, name: str) -> str:
        """A variable of the host's environment, one that the probe reports; "" if it is not set."""
        return str(self.facts["environment"]["variables"].get(name, ""))


Cases = Mapping[str, Case]
Outcome = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Check:
    """One thing that users have met.

    Attributes:
        name: as it is called on the command line.
        area: one of :data:`AREAS`; what is shown together.
        severity: one of :data:`SEVERITIES`, for what it finds wrong.
        looks_at: what it looks at and why that matters, one sentence.
        needs: the probes whose facts it reads.
        host, hosts: its function, for one host or for several compared; the other is None.
    """

    name: str
    area: str
    severity: str
    looks_at: str
    needs: tuple[str, ...]
    host: Callable[[Case], Outcome] | None = None
    hosts: Callable[[Cases], Outcome] | None = None


@dataclass(frozen=True)
class Result:
    """What a check said.

    Attributes:
        check: its name.
        area, severity: the check's; the severity is "ok" if nothing is wrong, "unknown" if it could not look.
        hosts: whom it is about.
        text, mend: of the finding.
    """

    check: str
    area: str
    severity: str
    hosts: tuple[str, ...]
    text: str
    mend: str = ""

    @property
    def wrong(self) -> bool:
        """Whether there is something to mend."""
        return self.severity in SEVERITIES


_checks: dict[str, Check] = {}


def _add(check: Check) -> None:
    assert check.name not in _checks, check.name
    assert check.area in AREAS, check.area
    assert check.severity in SEVERITIES, check.severity
    _checks[check.name] = check


def host_check(
    name: str, area: str, severity: str, looks_at: str, needs: Iterable[str] = ()
) -> Callable[[Callable[[Case], Outcome]], Callable[[Case], Outcome]]:
    """Enter a function of one host's facts as a check; `needs` defaults to the probe named as the area."""

    def enter(function: Callable[[Case], Outcome]) -> Callable[[Case], Outcome]:
        _add(Check(name, area, severity, looks_at, tuple(needs) or (area,), host=function))
        return function

    return enter


def hosts_check(
    name: str, area: str, severity: str, looks_at: str, needs: Iterable[str] = ()
) -> Callable[[Callable[[Cases], Outcome]], Callable[[Cases], Outcome]]:
    """Enter a function that compares several hosts as a check; it is called only with two or more."""

    def enter(function: Callable[[Cases], Outcome]) -> Callable[[Cases], Outcome]:
        _add(Check(name, area, severity, looks_at, tuple(needs) or (area,), hosts=function))
        return function

    return enter


def all_checks() -> dict[str, Check]:
    """Every check by name, in the order of the areas."""
    from ringdance.doctor import checks

    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    return dict(sorted(_checks.items(), key=lambda item: AREAS.index(item[1].area)))


def examine(facts: Mapping[str, Facts], wanted: Wanted, names: Iterable[str] | None = None) -> list[Result]:
    """Apply checks to the facts of one or several hosts.

    Args:
        facts: by the hosts' names.
        wanted: what they are to be used for.
        names: of the checks; None for all whose probes were run.
    """
    cases = {host: Case(found, wanted, wanted.slots.get(host, 0)) for host, found in facts.items()}
    found: list[Result] = []
    for check in all_checks().values():
        if names is None or check.name in names:
            found += _folded(_of_hosts(check, cases) if check.hosts else _of_each(check, cases))
    return found


def _of_each(check: Check, cases: Cases) -> Iterable[Result]:
    assert check.host
    for host, case in cases.items():
        failed = _failed(check, case)
        if failed is not None:
            if failed:
                yield Result(check.name, check.area, "unknown", (host,), failed)
            continue
        for finding in _listed(check.host(case)):
            yield _result(check, finding, (host,))


def _of_hosts(check: Check, cases: Cases) -> Iterable[Result]:
    assert check.hosts
    seen = {host: case for host, case in cases.items() if _failed(check, case) is None}
    if len(seen) > 1:
        for finding in _listed(check.hosts(seen)):
            yield _result(check, finding, finding.hosts or tuple(seen))


def _failed(check: Check, case: Case) -> str | None:
    """Why a probe that the check needs has no facts; "" if it was not run, None if all have."""
    for probe in check.needs:
        if probe not in case.facts:
            return ""
        if "failed" in case[probe]:
            return f"could not look: {case[probe]['failed']}"
    return None


def _listed(outcome: Outcome) -> list[Finding]:
    if outcome is None:
        return []
    return [outcome] if isinstance(outcome, Finding) else list(outcome)


def _result(check: Check, finding: Finding, hosts: tuple[str, ...]) -> Result:
    severity = (finding.severity or check.severity) if finding.wrong else "ok"
    return Result(check.name, check.area, severity, hosts, finding.text, finding.mend)


def _folded(results: Iterable[Result]) -> list[Result]:
    """The same, with what is said of several hosts in the same words said once."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for r in results:
        hosts.setdefault((r.check, r.area, r.severity, r.text, r.mend), []).extend(r.hosts)
    return [
        Result(check, area, severity, tuple(names), text, mend)
        for (check, area, severity, text, mend), names in hosts.items()
    ]
