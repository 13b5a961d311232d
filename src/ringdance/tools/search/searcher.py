"""Run the trials of a study in parallel, and manage their processes and results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.live import Live

from ringdance.errors import LaunchError
from ringdance.host.schedulers.hostfile import HostList, hosts_text
from ringdance.host.system.signals import STOPPING
from ringdance.launch.spec import resolve_command
from ringdance.tools.search import REPORT, STOP
from ringdance.tools.search.space import Reader, fill
from ringdance.tools.search.study import Study, short, table

_POLL_S = 0.1
_STOP_S = 5.0  # how long to wait for a pruned trial to reach its next report and exit
_ALONE_S = 1.0  # how long other processes may outlive the trial's main process
MARK = "RINGDANCE_SEARCH_TRIAL"
"""Environment variable that all processes of a trial inherit. Its value is the trial's directory."""
_KILLED = 128 + signal.SIGKILL
# Runs a trial and writes its exit code to a file, so that the code is not lost if the trial outlives its
# searcher. The trap keeps sh alive until the trial has exited. After a signal, the code is always 143: a
# trial that handles the signal may save its state and exit with 0 although it is unfinished.
_SHELL = """trap signalled=143 TERM HUP INT
"$@"; code=$?; echo "${signalled:-$code}" > "$0.new" && sync "$0.new" && mv "$0.new" "$0"; exit $code"""

Place = Sequence[tuple[str, int]]
"""Slots for one trial: the host, and the slot number on this host, of each slot."""


def places(hosts: HostList, ranks: int) -> list[Place]:
    """Divide all slots into places, each with ``ranks`` slots, which are on the same host if possible.

    Raises:
        LaunchError: There are too few slots for a single trial.
    """
    slots = [(host, number) for host, count in hosts for number in range(count - count % ranks)]
    slots += [(host, number) for host, count in hosts for number in range(count - count % ranks, count)]
    if len(slots) < ranks:
        fix = f"Pass --ranks-per-trial {len(slots)}, or more hosts, such as -H h1:4,h2:4"
        raise LaunchError(f"a trial needs {ranks} slots, but the hosts have only {len(slots)}. {fix}")
    return [slots[first : first + ranks] for first in range(0, len(slots) - ranks + 1, ranks)]


class Attempt:
    """An attempt to run a trial, started by this searcher or by an earlier one.

    Attributes:
        trial: The Optuna trial.
        directory: Directory for the files of this trial. The exit code is written to the file ``exit``. If
            the file ``report.jsonl.stop`` exists, the trial ends at its next report.
        reader: Reads the objective values of the trial.
    """

    def __init__(self, study: Study, number: int | None = None) -> None:
        """Take over trial ``number`` of the study, or create a new trial if ``number`` is None."""
        self.trial, objective = study.trial(number), study.space.objective
        self.directory = (study.directory / "trials" / f"{self.trial.number:04}").resolve()
        self.exit, self.log = self.directory / "exit", self.directory / "log"
        self.report = self.directory / "report.jsonl"
        self.stop = Path(f"{self.report}{STOP}")
        self.reader = Reader(objective, self.log if objective.line else self.report)
        self._leader: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the trial in a new session. The output of its processes is written to the file ``log``."""
        shutil.rmtree(self.directory, ignore_errors=True)  # may be left behind by an interrupted start
        self.directory.mkdir(parents=True)
        (self.directory / "params.json").write_text(json.dumps(self.trial.params) + "\n")
        words, none = ["/bin/sh", "-c", _SHELL, str(self.exit), *command], subprocess.DEVNULL
        environ = {**environ, REPORT: str(self.report), MARK: str(self.directory)}
        with open(self.log, "wb") as log:
            self._leader = subprocess.Popen(
                words, stdin=none, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def code(self) -> int | None:
        """Return the exit code (128 + n after signal n), or None while the trial is running."""
        if self.exit.exists() and (text := self.exit.read_text().strip()):  # may be empty after a host crash
            return int(text)
        return None if self._leader and self._leader.poll() is None else _KILLED

    def processes(self) -> list[psutil.Process]:
        """Return the processes on this host that belong to the attempt."""
        processes, mark = psutil.process_iter(["environ"]), str(self.directory)
        return [p for p in processes if (p.info["environ"] or {}).get(MARK) == mark]  # None for a zombie


@dataclass
class Searcher:
    """Runs the trials of a study, with one worker thread per place.

    Attributes:
        places: Groups of slots. Each runs one trial at a time.
        command: Command that runs a trial, with placeholders.
        launch: Options of ``ringdance run``. If None, the command runs directly on this machine.
        environ: Environment variables of the trials.
        grace: Seconds to wait for a trial to exit after SIGTERM.
    """

    study: Study
    console: Console
    places: Sequence[Place]
    command: Sequence[str]
    launch: Sequence[str] | None
    environ: Mapping[str, str]
    grace: float
    _signals: int = 0
    # Protects the next two fields and the study. Not held while a trial's reports are being read.
    _waiting: list[int] = field(default_factory=list)  # numbers of trials to restart
    _failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        """Run trials until the study is complete. Returns the exit code."""
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._signal)
        live = Live(get_renderable=lambda: table(self.study, "RUNNING"), console=self.console, transient=True)
        with live, ThreadPoolExecutor(len(self.places)) as pool:
            list(pool.map(self._take_up, [trial.number for trial in self.study.trials("RUNNING")]))
            list(pool.map(self._work, self.places))
        if self._signals:
            self.console.print("Stopped. Run the same command again to continue the search.")
            return 130
        if given_up := self._failed >= self.study.space.failures:
            text = "The search stops, because too many trials have failed (`failures:` in the search file)."
            self.console.print(text, soft_wrap=True)
        return 1 if given_up or not self.study.best() else 0

    def _signal(self, *_: object) -> None:
        self._signals += 1

    # --- on worker threads -------------------------------------------------------------------------

    def _take_up(self, number: int) -> None:
        """End a trial left behind by a killed searcher. Records its result, or schedules a restart."""
        with self._lock:
            attempt = Attempt(self.study, number)
        self._end(attempt)
        with self._lock:
            self._finish(attempt, left=True)

    def _work(self, place: Place) -> None:
        """Run trials in ``place``, one at a time, until the search ends."""
        try:
            while attempt := self._next():
                self._run(attempt, place)
        except BaseException:
            self._signals += 1  # makes the other threads stop
            raise

    def _next(self) -> Attempt | None:
        with self._lock:
            if self._signals or self._failed >= self.study.space.failures:
                return None
            if self._waiting:
                return Attempt(self.study, self._waiting.pop(0))
            enough = self.study.exhausted or len(self.study.trials()) >= self.study.space.trials
            return None if enough else Attempt(self.study)

    def _run(self, one: Attempt, place: Place) -> None:
        """Run a trial until it exits or is pruned. On a signal, end the trial but leave it unfinished."""
        slots = ",".join(str(number) for _, number in place)
        filled = fill(self.command, one.trial.params, one.directory, slots)
        launch = [] if self.launch is None else ["ringdance", "run", "-np", str(len(place)), *self.launch]
        one.trial.set_user_attr("command", [*launch, *filled])
        command = resolve_command(filled)
        if launch:
            hosts = hosts_text([(host, 1) for host, _ in place])
            options = ["-H", hosts, "-x", "RINGDANCE_SUMMARY_TIME=0"]
            command = [sys.executable, "-m", *launch, *options, "--", *command]
        one.start(command, self.environ)
        until = math.inf
        try:
            while one.code() is None and not self._signals and time.monotonic() < until:
                time.sleep(_POLL_S)
                if not one.stop.exists() and self._passed_on(one):
                    one.stop.touch()
                    until = time.monotonic() + min(_STOP_S, self.grace)
        finally:
            self._end(one)
        if not self._signals:
            with self._lock:
                self._finish(one)

    def _passed_on(self, one: Attempt, ended: bool = False) -> bool:
        """Pass a trial's new values to the pruner. Returns True if the pruner decides to prune the trial."""
        pruned = False
        for step, value in one.reader.new(ended):
            if self.study.space.pruner["name"] != "nop":  # each report costs an fsync
                one.trial.report(value, step)
                pruned = one.trial.should_prune() or pruned
        return pruned

    def _end(self, one: Attempt) -> None:
        """End the trial's processes on this host, first with SIGTERM. The launcher ends the others."""
        shells, until = [], time.monotonic() + self.grace
        for process in one.processes() if one.code() in (None, _KILLED) else []:
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == process.pid and process.name() == "sh":
                    os.killpg(process.pid, signal.SIGTERM)
                    shells.append(process)
        while shells and self._signals < 2 and time.monotonic() < until:
            _, shells = psutil.wait_procs(shells, timeout=_POLL_S)
        psutil.wait_procs(one.processes(), timeout=_ALONE_S if self._signals < 2 else 0.0)
        while living := one.processes():
            for process in living:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(living, timeout=0.2)

    # --- outcome of a trial ------------------------------------------------------------------------

    def _finish(self, one: Attempt, left: bool = False) -> None:
        """Record how a trial ended. Restart a killed trial once.

        A killed trial that an earlier searcher left behind (``left``) is always restarted.
        """
        code, trial = one.code() or 0, one.trial
        self._passed_on(one, ended=True)
        if one.stop.exists():
            self.study.tell(trial, "PRUNED")
            return self._say(one, f"pruned at report {len(one.reader.values)}")
        result, reason = one.reader.result()
        reason = f"exit code {code}" if code else reason
        if not reason:
            self.study.tell(trial, "COMPLETE", result)
            return self._say(one, f"{self.study.space.objective.name} {result:.6g}")
        reason += f" ({self._set_aside(one) / 'log'})"
        if 128 < code <= 128 + signal.SIGRTMAX and (left or not trial.user_attrs.get("killed")):
            trial.set_user_attr("killed", not left)
            self._waiting.append(trial.number)
            return self._say(one, f"was killed and will be restarted: {reason}")
        self._failed += bool(code or not one.reader.values)  # NaN and inf are not counted
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, "FAIL")
        self._say(one, f"failed: {reason}")

    def _set_aside(self, one: Attempt) -> Path:
        """Move a failed attempt's directory to ``failed``. Returns the directory's new path."""
        failed, name = self.study.directory / "failed", one.directory.name
        target = failed / f"{name}.{1 + len(list(failed.glob(f'{name}.*')))}"
        failed.mkdir(exist_ok=True)
        if one.directory.exists():
            one.directory.rename(target)
        return target

    def _say(self, one: Attempt, text: str) -> None:
        parameters = ", ".join(f"{name} {short(value)}" for name, value in one.trial.params.items())
        self.console.print(f"trial {one.trial.number}: {text}; {parameters}", soft_wrap=True)
