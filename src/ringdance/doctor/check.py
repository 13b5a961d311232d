"""What a check is, what it reads and what it finds.

A check is a pure function of facts, which probes have collected on one host or on several. It returns a
:class:`Finding`, several, or None where it does not apply (no GPU, no Slurm). One with a fix is a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]
"""Results of one host's probes by the probe's name; ``{"failed": REASON}`` for a probe that failed."""

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
"""A job fails or its result is wrong; it is slow or at risk; worth knowing."""

AREAS = (
    "hosts", "network", "python", "frameworks", "mpi", "environment", "cpu", "memory", "limits", "disk",
    "gpu", "leftovers",
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
        return str(self["environment"]["variables"].get(name, ""))


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
