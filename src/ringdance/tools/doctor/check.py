"""Checks, their input and their results.

A check is a pure function of facts that probes have collected on one or several hosts. It returns one or
several ``Finding`` objects, or None if it does not apply (no GPU, no Slurm). If a finding has a fix, it
reports a problem.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringdance.launch.hosts import several

Facts = Mapping[str, Any]
"""Results of one host's probes by the probe's name. A failed probe's result is ``{"failed": REASON}``."""

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""ERROR: a job fails or its result is wrong. WARNING: it is slow or at risk. NOTE: worth knowing."""

AREAS = (
    "hosts", "network", "python", "frameworks", "mpi", "cpu", "memory", "limits", "disk", "gpu", "leftovers",
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """The planned use of the hosts.

    Attributes:
        slots: Ranks on each host by name. Empty if unknown.
        directories: Directories for logs and checkpoints.
        hosts: Names of all hosts. Empty if only this machine is checked.
        cwd: Directory in which the command will run.
    """

    slots: Mapping[str, int] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    cwd: str = ""


@dataclass(frozen=True)
class Finding:
    """One sentence about one or several hosts.

    Attributes:
        text: The sentence. It names hosts only if the check compares them.
        fix: A line that says how to fix the problem. Empty if nothing is wrong.
        severity: Replaces the check's severity if set.
        hosts: Hosts concerned, if the check compares hosts. Empty for all.
    """

    text: str
    fix: str = ""
    severity: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """One host's facts for a check: ``host["memory"]["total"]``.

    Attributes:
        facts: Facts by probe.
        usage: Planned use of the hosts.
        slots: Ranks on this host, 0 if unknown.
    """

    facts: Facts
    usage: Usage = Usage()
    slots: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def variable(self, name: str) -> str:
        """Return an environment variable of the host, "" if it is not set. The probe must report it."""
        return str(self["environment"].get(name, ""))


Hosts = Mapping[str, HostFacts]
Outcome = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Check:
    """One kind of problem.

    Attributes:
        name: Name on the command line.
        area: One of ``AREAS``. The heading in reports.
        severity: One of ``SEVERITIES``. Applies if something is wrong.
        description: Subject of the check and why it matters.
        judge: Function that returns the findings. Its argument is a ``HostFacts``, or if ``compares``,
            several by name.
        needs: Probes whose facts ``judge`` reads. Default: the probe with the area's name.
        compares: If True, the check compares hosts and is called only with two or more.
    """

    name: str
    area: str
    severity: str
    description: str
    judge: Callable[[Any], Outcome]
    needs: tuple[str, ...] = ()
    compares: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.needs or (self.area,))


@dataclass(frozen=True)
class Result:
    """The outcome of a check on one or several hosts.

    Attributes:
        check: Name of the check.
        area, severity: The check's area and severity. The severity is "ok" if nothing is wrong, "unknown" if
            a probe failed.
        hosts: Hosts concerned.
        text, fix: The finding's text and fix.
    """

    check: str
    area: str
    severity: str
    hosts: tuple[str, ...]
    text: str
    fix: str = ""

    @property
    def wrong(self) -> bool:
        """True if there is something to fix."""
        return self.severity in SEVERITIES


# --- shared by several checks ----------------------------------------------------------------------


def last_line(output: str) -> str:
    """Return the last non-empty line of a program's output, "" if there is none."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def size(count: float) -> str:
    """Format a number of bytes with a unit that is a power of 1024."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


class _Formatter(string.Formatter):
    """Adds two conversions: ``{memory[total]!b}`` formats bytes, ``{network[own]!l}`` a list of names."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "b":
            return "no limit" if value is None else size(value)
        return several(value) if conversion == "l" else super().convert_field(value, conversion)


def limit(
    text: str,
    wrong: Callable[[HostFacts], Any],
    fix: str,
    *,
    problem: str = "",
    applies: Callable[[HostFacts], Any] = lambda host: True,
) -> Callable[[HostFacts], Finding | None]:
    """Return a function that checks one host by a condition.

    ``text``, ``fix`` and ``problem`` may hold fields such as ``{cpu[usable]}`` and ``{slots}``.

    Args:
        text: The fact.
        wrong: Returns True if the fact is a problem.
        fix: A line that says how to fix it.
        problem: Text of a problem. Default: ``text``.
        applies: Returns True if the check applies to the host at all.
    """

    def judge(host: HostFacts) -> Finding | None:
        if not applies(host):
            return None
        bad = bool(wrong(host))
        fields = {**host.facts, "slots": host.slots}
        shown = _Formatter().vformat(problem or text if bad else text, (), fields)
        return Finding(shown, _Formatter().vformat(fix, (), fields) if bad else "")

    return judge


def equal(values: Callable[[HostFacts], Mapping[str, str]], fix: str) -> Callable[[Hosts], Iterator[Finding]]:
    """Return a function that checks whether hosts have equal values.

    Args:
        values: Returns a host's values as text by name, such as ``{"Python": "3.12"}``.
        fix: A line that says how to remove a difference.
    """

    def judge(hosts: Hosts) -> Iterator[Finding]:
        known = {name: values(host) for name, host in hosts.items()}
        for what in dict.fromkeys(what for own in known.values() for what in own):
            yield from outliers({name: own.get(what, "(missing)") for name, own in known.items()}, fix, what)

    return judge


def outliers(values: Mapping[str, str], fix: str, what: str = "") -> Iterator[Finding]:
    """Compare the hosts' values with the most common one.

    Yields one finding if all hosts have the same value, otherwise one for each value except the most common.

    Args:
        values: Values by host. Among equally common values, the first counts as the most common.
        fix: A line that says how to remove a difference.
        what: Name that precedes each value in the text.
    """
    counts = Counter(values.values())
    common = max(counts, key=lambda value: counts[value])
    before = f"{what} " if what else ""
    if len(counts) == 1:
        yield Finding(f"{before}{common} on all hosts", hosts=tuple(values))
        return
    others = several([host for host, value in values.items() if value == common], 3)
    for value in counts:
        if value != common:
            odd = tuple(host for host, own in values.items() if own == value)
            yield Finding(f"{before}{value} on {', '.join(odd)}, but {common} on {others}", fix, hosts=odd)
