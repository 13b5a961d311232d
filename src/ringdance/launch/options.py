"""How a job is run, apart from what is started (plan.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringdance.launch.output.results import Results
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import WITH_RANK, Sink, Style


@dataclass(frozen=True)
class Options:
    """How to run a plan.

    Attributes:
        screen: where the ranks' output goes.
        fold: whether equal lines of several ranks are shown once (not with JSON, nor in files).
        style: how lines are shown.
        output_directory: for per-rank files, or None.
        start_timeout: seconds until all ranks must have started.
        verbose: whether steps, and all messages of mpiexec, are shown.
        stdin: file descriptor of rank 0's input; -1 for none.
        files: contents of files in the job's directory on every host, by name, for the ranks (call.py).
        needed: files that every host must have.
        results: takes the ranks' ``result.*.pkl`` from there if all complete, or None.
        heartbeat_timeout: seconds without a heartbeat after which a host is lost.
        grace: seconds that ranks have to end after a signal to the launcher; a second signal ends them.
    """

    screen: Screen
    fold: bool = False
    style: Style = WITH_RANK
    output_directory: Path | None = None
    start_timeout: float = 60.0
    verbose: bool = False
    stdin: int = -1
    files: Mapping[str, bytes] = field(default_factory=dict)
    needed: Sequence[str] = ()
    results: Results | None = None
    heartbeat_timeout: float = 6.0
    grace: float = 0.8

    @property
    def out(self) -> Sink:
        """The launcher's own stdout."""
        return self.screen.of(0)

    @property
    def err(self) -> Sink:
        """The launcher's own stderr."""
        return self.screen.of(1)
