"""The processes of a trial: where they run, how they are started, found and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ringdance.cluster.hostfile import HostList
from ringdance.errors import LaunchError
from ringdance.search import REPORT, STOP
from ringdance.search.space import Reader

if TYPE_CHECKING:
    from optuna.trial import Trial

MARK = "RINGDANCE_SEARCH_TRIAL"
"""Variable that all processes of a trial inherit: its directory."""
KILLED = 128 + signal.SIGKILL
# Writes the exit code down, so that also a trial that ends after its searcher has a result. With a handler
# sh outlives the signals that its process group gets.
_SHELL = 'trap : TERM HUP INT; "$@"; code=$?; echo $code > "$0.new" && mv "$0.new" "$0"; exit $code'

Place = Sequence[tuple[str, int]]
"""Slots of a trial: host and number of the slot there."""


def places(hosts: HostList, ranks: int) -> list[Place]:
    """Share slots out to trials of `ranks` each: on one host where there is room.

    Raises:
        LaunchError: there are too few slots for a single trial.
    """
    slots = [(host, number) for host, count in hosts for number in range(count - count % ranks)]
    slots += [(host, number) for host, count in hosts for number in range(count - count % ranks, count)]
    if len(slots) < ranks:
        raise LaunchError(f"a trial needs {ranks} slots (--ranks-per-trial), and there are {len(slots)} (-H)")
    return [slots[first : first + ranks] for first in range(0, len(slots) - ranks + 1, ranks)]


def run_options(place: Place, exports: Mapping[str, str]) -> list[str]:
    """Return the ``ringdance run`` for a place, to which more options and the command are added."""
    counts = Counter(f"[{host}]" if ":" in host else host for host, _ in place)
    hosts = ",".join(f"{host}:{count}" for host, count in counts.items())
    words = [word for name, value in exports.items() for word in ("-x", f"{name}={value}")]
    return [sys.executable, "-m", "ringdance", "run", "-np", str(len(place)), "-H", hosts, "--quiet", *words]


@dataclass
class Attempt:
    """An attempt at a trial, started by this searcher or by an earlier one.

    Attributes:
        trial: in Optuna.
        directory: its own.
        reader: of what it reports.
        place: where it runs.
        ends: what has yet to be done to end it, and when.
    """

    trial: Trial
    directory: Path
    reader: Reader
    place: Place = ()
    ends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _leader: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        """Name its files: of its exit code, and by which its next report ends it."""
        self.directory = self.directory.resolve()
        self.exit, self.stop = self.directory / "exit", self.directory / f"report.jsonl{STOP}"

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it in its own session, with its output in ``log``."""
        words, none = ["/bin/sh", "-c", _SHELL, str(self.exit), *command], subprocess.DEVNULL
        own = {REPORT: str(self.directory / "report.jsonl"), MARK: str(self.directory)}
        environ = {**os.environ, **environ, **own}
        with open(self.directory / "log", "wb") as log:
            self._leader = subprocess.Popen(
                words, stdin=none, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def code(self) -> int | None:
        """Return the exit code, None while it runs; 128 + n for signal n."""
        if self.exit.exists():
            return int(self.exit.read_text())
        return None if self._leader and self._leader.poll() is None else KILLED

    def terminate(self) -> None:
        """Send SIGTERM to the command, and to nothing that a ``ringdance run`` looks after itself."""
        for one in self._living():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(one.pid) == one.pid and one.name() == "sh":
                    os.killpg(one.pid, signal.SIGTERM)

    def _living(self) -> list[psutil.Process]:
        found, mark = psutil.process_iter(["environ"]), str(self.directory)  # of a zombie it is empty
        return [one for one in found if (one.info["environ"] or {}).get(MARK) == mark]

    def kill(self, patience: float = 0.0) -> None:
        """End all its processes on this host, and wait for that; those elsewhere end with ``ringdance run``.

        Args:
            patience: seconds for those that end by themselves.
        """
        psutil.wait_procs(self._living(), timeout=patience)
        while living := self._living():
            for one in living:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(living, timeout=0.2)
