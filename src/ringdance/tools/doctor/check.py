"""What a check is, what it reads and what it finds.

A check is a pure function of facts, which probes have collected on one host or on several. It returns a
:class:`Finding`, several, or None where it does not apply (no GPU, no Slurm). One with a fix is a problem.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringdance.launch.hosts import several

Facts = Mapping[str, Any]
"""Results of one host's probes by the probe's name; ``{"failed": REASON}`` for a probe that failed."""

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""A job fails or its result is wrong; it is slow or at risk; worth knowing."""

AREAS = (
    "hosts", "network", "python", "frameworks", "mpi", "cpu", "memory", "limits", "disk", "gpu", "leftovers",
)  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """What the hosts are to be used for.

    Attributes:
        slots: ranks on each host by its name; empty if not known.
        directories: directories for logs and checkpoints.
        hosts: names of all hosts; empty for this machine alone.
        cwd: the directory in which the command will run.
    """

    slots: Mapping[str, int] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    cwd: str = ""


@dataclass(frozen=True)
class Finding:
    """One sentence about one or several hosts.

    Attributes:
        text: the sentence; without the host's name, unless several hosts are compared.
        fix: the line that fixes it; empty if nothing is wrong.
        severity: in place of the check's own.
        hosts: the hosts concerned, where hosts are compared; empty for all.
    """

    text: str
    fix: str = ""
    severity: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """One host's facts as a check reads them: ``host["memory"]["total"]``.

    Attributes:
        facts: by probe.
        usage: what the hosts are to be used for.
        slots: ranks on this host, 0 if not known.
    """

    facts: Facts
    usage: Usage = Usage()
    slots: int = 0

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def variable(self, name: str) -> str:
        """Return a variable of the host's environment that the probe reports; "" if it is not set."""
        return str(self["environment"].get(name, ""))


Hosts = Mapping[str, Host]
Outcome = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Check:
    """One kind of problem.

    Attributes:
        name: for the command line.
        area: one of :data:`AREAS`; the heading in reports.
        severity: one of :data:`SEVERITIES`, if something is wrong.
        description: what is checked and why it matters.
        judge: called with a :class:`Host`, or with several by name if `compares`.
        needs: probes whose facts `judge` reads; the one named as the area by default.
        compares: whether it compares hosts; it is then called only with two or more.
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
        check: its name.
        area, severity: the check's; severity is "ok" if nothing is wrong, "unknown" if a probe failed.
        hosts: the hosts concerned.
        text, fix: of the finding.
    """

    check: str
    area: str
    severity: str
    hosts: tuple[str, ...]
    text: str
    fix: str = ""

    @property
    def wrong(self) -> bool:
        """Whether there is something to fix."""
        return self.severity in SEVERITIES


# --- what several checks share ---------------------------------------------------------------------


def last_line(output: str) -> str:
    """Return the last line of a program's output that is not empty."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def size(count: float) -> str:
    """Format bytes with a unit, powers of 1024."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


class _Formatter(string.Formatter):
    """``{memory[total]!b}`` is a size in bytes, ``{network[own]!l}`` a list of names."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "b":
            return "no limit" if value is None else size(value)
        return several(value) if conversion == "l" else super().convert_field(value, conversion)


def limit(
    text: str,
    wrong: Callable[[Host], Any],
    fix: str,
    *,
    problem: str = "",
    applies: Callable[[Host], Any] = lambda host: True,
) -> Callable[[Host], Finding | None]:
    """Judge one host by a condition.

    Args:
        text: the fact; it and the next two may hold fields such as ``{cpu[usable]}``, ``{slots}``.
        wrong: whether the fact is a problem.
        fix: the line that fixes it.
        problem: in place of `text` if it is one.
        applies: whether the host has such a thing at all.
    """

    def judge(host: Host) -> Finding | None:
        if not applies(host):
            return None
        bad = bool(wrong(host))
        fields = {**host.facts, "slots": host.slots}
        shown = _Formatter().vformat(problem or text if bad else text, (), fields)
        return Finding(shown, _Formatter().vformat(fix, (), fields) if bad else "")

    return judge


def equal(values: Callable[[Host], Mapping[str, str]], fix: str) -> Callable[[Hosts], Iterator[Finding]]:
    """Judge whether hosts agree.

    Args:
        values: a host's values as text by what they are of, as in ``{"Python": "3.12"}``.
        fix: the line that removes a difference.
    """

    def judge(hosts: Hosts) -> Iterator[Finding]:
        found = {name: values(host) for name, host in hosts.items()}
        for what in dict.fromkeys(what for own in found.values() for what in own):
            yield from outliers({name: own.get(what, "(missing)") for name, own in found.items()}, fix, what)

    return judge


def outliers(values: Mapping[str, str], fix: str, what: str = "") -> Iterator[Finding]:
    """Yield one finding if all hosts have the same value, else one for each value but the most common.

    Args:
        values: by host; of equally common ones the first host's counts as the most common.
        fix: the line that removes a difference.
        what: before each value in the text.
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
