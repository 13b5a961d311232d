"""The processes of a trial: where they run, how they are started, found and ended."""

from __future__ import annotations

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
        raise LaunchError(f"--ranks-per-trial {ranks} needs as many slots, and there are {len(slots)}: -H")
    return [slots[first : first + ranks] for first in range(0, len(slots) - ranks + 1, ranks)]


def run_options(place: Place, exports: Mapping[str, str]) -> list[str]:
    """Return the ``ringdance run`` for a place, to which more options and the command are added."""
    counts = Counter(f"[{host}]" if ":" in host else host for host, _ in place)
    hosts = ",".join(f"{host}:{count}" for host, count in counts.items())
    words = [word for name, value in exports.items() for word in ("-x", f"{name}={value}")]
    return [sys.executable, "-m", "ringdance", "run", "-np", str(len(place)), "-H", hosts, "--quiet", *words]


class Process:
    """A trial's command, started by this searcher or, without its pid, by an earlier one."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.directory, self._mark = directory, mark
        self._leader: subprocess.Popen[bytes] | None = None
        self._exit, self._stop = directory / "exit", directory / f"report.jsonl{STOP}"

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it in its own session, with its output in ``log``."""
        own = {REPORT: str((self.directory / "report.jsonl").absolute()), MARK: self._mark}
        words = ["/bin/sh", "-c", _SHELL, str(self._exit.absolute()), *command]
        with open(self.directory / "log", "wb") as log:
            self._leader = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environ, **own},
                start_new_session=True,
            )  # fmt: skip

    def code(self) -> int | None:
        """Return the exit code, None while it runs; 128 + n for signal n."""
        if self._exit.exists():
            return int(self._exit.read_text())
        return None if self._leader and self._leader.poll() is None else KILLED

    def ask_to_stop(self) -> None:
        """Have its next report end it."""
        self._stop.touch()

    @property
    def asked_to_stop(self) -> bool:
        """Whether it was asked to, also by an earlier searcher."""
        return self._stop.exists()

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        if self._leader and self._leader.poll() is None:  # not reaped: the number is its own
            os.killpg(self._leader.pid, signal.SIGTERM)

    def kill(self, patience: float = 0.0) -> None:
        """End all its processes on this host, and wait for that; those elsewhere end with ``ringdance run``.

        Args:
            patience: seconds for those that end by themselves.
        """
        deadline = time.monotonic() + patience
        while living := [one for one in psutil.process_iter() if _mark_of(one) == self._mark]:
            if time.monotonic() >= deadline:
                for one in living:
                    _kill(one)
            psutil.wait_procs(living, timeout=0.2)


def _mark_of(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return ""


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        pass
