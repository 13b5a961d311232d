"""Types for checks, their inputs and their results, and helpers for writing checks.

A check is a pure function of the facts that probes have collected on one or more hosts. It returns one or
more ``Finding`` objects, or None if it does not apply, for example on a host without a GPU. A finding with a
fix is a problem.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringdance.launch.hosts import counted, several

Facts = Mapping[str, Any]
"""Results of the probes on a host, by probe name. The result of a failed probe is ``{"failed": REASON}``."""

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""ERROR: a job fails or its result is wrong. WARNING: a job is slow or may fail. NOTE: worth knowing."""

AREAS = (
    "hosts", "network", "python", "frameworks", "mpi", "cpu", "memory", "limits", "disk", "gpu", "leftovers",
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """How the user intends to use the hosts.

    Attributes:
        slots: Number of ranks by host name, or {} if unknown.
        directories: Directories to which logs and checkpoints will be written.
        hosts: Names of all hosts, or empty if only this machine is checked.
        cwd: Directory in which the command will run.
    """

    slots: Mapping[str, int] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    cwd: str = ""


@dataclass(frozen=True)
class Finding:
    """What a check found on one or more hosts.

    Attributes:
        text: Sentence that states the finding. It names hosts only if the check compares hosts.
        fix: One line that says how to fix the problem, or "" if nothing is wrong.
        severity: If set, overrides the severity of the check.
        hosts: Hosts that the finding applies to, if the check compares hosts. Empty means all hosts.
    """

    text: str
    fix: str = ""
    severity: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """Facts about one host, indexed by the name of the probe: ``host["memory"]["total"]``.

    Attributes:
        facts: Facts by the name of the probe.
        slots: Number of ranks on this host, or 0 if unknown.
    """

    facts: Facts
    slots: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def variable(self, name: str) -> str:
        """Return the value of an environment variable from the environment probe, or "" if it is not set."""
        return str(self["environment"].get(name, ""))


Hosts = Mapping[str, HostFacts]
Outcome = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Check:
    """A check for one kind of problem.

    Attributes:
        name: Name of the check on the command line.
        area: One of ``AREAS``, under which reports list the check.
        severity: One of ``SEVERITIES``. Applies to every problem that the check finds.
        description: What is checked and why it matters.
        judge: Function that returns the findings. Takes a ``HostFacts``, or a mapping of host names to
            ``HostFacts`` if ``compares`` is True.
        needs: Names of the probes whose facts ``judge`` reads. Default: the probe named after the area.
        compares: If True, the check compares hosts and is skipped if there is only one.
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
    """The result of one check on one or more hosts.

    Attributes:
        check: Name of the check.
        area, severity: The check's area and severity. The severity is "ok" if nothing is wrong, and "unknown"
            if a probe failed.
        hosts: Hosts that this result applies to.
        text, fix: Text and fix of the finding. See ``Finding``.
    """

    check: str
    area: str
    severity: str
    hosts: tuple[str, ...]
    text: str
    fix: str = ""

    @property
    def wrong(self) -> bool:
        """True if the check found a problem."""
        return self.severity in SEVERITIES


# --- helpers for checks ----------------------------------------------------------------------------


def last_line(output: str) -> str:
    """Return the last non-empty line of a program's output, or "" if all lines are empty."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def size(count: float) -> str:
    """Format a number of bytes with a unit that is a power of 1024."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


class _Formatter(string.Formatter):
    """Formats sizes (``{memory[total]:size}``), lists (``{shadows:names}``) and counts (``{slots:rank}``)."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec == "size":
            return "no limit" if value is None else size(value)
        if spec == "names":
            return several(value)
        return counted(value, spec) if spec else str(value)


def limit(
    text: str, wrong: Callable[[HostFacts], Any], fix: str, *, problem: str = "",
    applies: Callable[[HostFacts], Any] = lambda host: True,
) -> Callable[[HostFacts], Finding | None]:
    """Build a ``judge`` function that tests a condition on one host.

    ``text``, ``fix`` and ``problem`` may contain fields such as ``{cpu[usable]}`` and ``{slots:rank}``.

    Args:
        text: Sentence that states the fact.
        wrong: Returns True if the fact is a problem on the host.
        fix: One line that says how to fix the problem.
        problem: Sentence to use instead of ``text`` if there is a problem. Default: ``text``.
        applies: Returns False if the check does not apply to the host. Default: always True.
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
    """Build a ``judge`` function that checks whether values are the same on all hosts.

    Args:
        values: Returns the values of a host as strings by name, such as ``{"Python": "3.12"}``.
        fix: One line that says how to resolve a difference.
    """

    def judge(hosts: Hosts) -> Iterator[Finding]:
        known = {name: values(host) for name, host in hosts.items()}
        for what in dict.fromkeys(what for own in known.values() for what in own):
            yield from outliers({name: own.get(what, "(missing)") for name, own in known.items()}, fix, what)

    return judge


def outliers(values: Mapping[str, str], fix: str, what: str = "") -> Iterator[Finding]:
    """Find hosts whose value differs from the most common value.

    Yields a single finding if all hosts have the same value, otherwise one for each less common value.

    Args:
        values: Values by host. If several values are equally common, the first counts as the most common.
        fix: One line that says how to resolve a difference.
        what: Name of the value, which precedes the value in the findings.
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
