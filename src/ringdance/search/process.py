"""The processes of a trial: where they run, how they are started, found and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ringdance.cluster.hostfile import HostList
from ringdance.errors import LaunchError
from ringdance.search import REPORT, STOP

MARK = "RINGDANCE_SEARCH_TRIAL"
"""Variable that all processes of a trial inherit: ``STUDY:NUMBER``."""
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


class Process:
    """A trial's command, started by this searcher or by an earlier one.

    Attributes:
        directory: the trial's own.
        exit: file with the exit code, once it has ended.
        stop: file that has the trial's next report end it.
    """

    def __init__(self, directory: Path, mark: str) -> None:
        self.directory, self._mark = directory, mark
        self._leader: subprocess.Popen[bytes] | None = None
        self.exit, self.stop = directory / "exit", directory / f"report.jsonl{STOP}"

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it in its own session, with its output in ``log``."""
        own = {REPORT: str((self.directory / "report.jsonl").absolute()), MARK: self._mark}
        words = ["/bin/sh", "-c", _SHELL, str(self.exit.absolute()), *command]
        with open(self.directory / "log", "wb") as log:
            self._leader = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environ, **own},
                start_new_session=True,
            )  # fmt: skip

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
        return [one for one in psutil.process_iter() if _mark_of(one) == self._mark]

    def kill(self, patience: float = 0.0) -> None:
        """End all its processes on this host, and wait for that; those elsewhere end with ``ringdance run``.

        Args:
            patience: seconds for those that end by themselves.
        """
        deadline = time.monotonic() + patience
        while living := self._living():
            if time.monotonic() >= deadline:
                for one in living:
                    with contextlib.suppress(psutil.Error):
                        one.kill()
            psutil.wait_procs(living, timeout=0.2)


def _mark_of(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return ""
