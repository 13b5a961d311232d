"""Run trials side by side until there are enough: their processes, and what is done when."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.live import Live

from ringdance.cluster.hostfile import HostList
from ringdance.errors import LaunchError
from ringdance.launch.spec import resolve_command
from ringdance.launch.system.signals import STOPPING
from ringdance.search import REPORT, STOP
from ringdance.search.space import Reader, Space, as_text, fill
from ringdance.search.study import Study, short, table

if TYPE_CHECKING:
    from optuna.trial import Trial

_POLL_S = 0.1
_STOP_S = 5.0  # at most, for a report to end a trial that is pruned
_ALONE_S = 1.0  # for processes to end when the one that led them has
MARK = "RINGDANCE_SEARCH_TRIAL"
"""Variable that all processes of a trial inherit: its directory."""
KILLED, TERMINATED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
# Writes the exit code down, so that also a trial that ends after its searcher has a result; before it, that
# a signal came: a trial may then save what it has and end well. With a handler sh outlives signals.
_SHELL = """trap ': > "$0.early"' TERM HUP INT
"$@"; code=$?; echo $code > "$0.new" && sync "$0.new" && mv "$0.new" "$0"; exit $code"""

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
    ends: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    _leader: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        """Name its files: of its exit code, of a signal before it, and by which its next report ends it."""
        self.directory = self.directory.resolve()
        self.exit, self.early = self.directory / "exit", self.directory / "exit.early"
        self.stop = self.directory / f"report.jsonl{STOP}"

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
        """Return the exit code, None while it runs; 128 + n for signal n, after which any code is one."""
        if self.exit.exists() and (text := self.exit.read_text().strip()):  # empty: the host went down
            return TERMINATED if self.early.exists() else int(text)
        return None if self._leader and self._leader.poll() is None else KILLED


def _living(attempts: Sequence[Attempt]) -> list[psutil.Process]:
    found, marks = psutil.process_iter(["environ"]), {str(one.directory) for one in attempts}
    return [one for one in found if (one.info["environ"] or {}).get(MARK) in marks]  # of a zombie it is empty


def terminate(attempts: Sequence[Attempt]) -> list[psutil.Process]:
    """Send SIGTERM to the commands, and to nothing that a ``ringdance run`` looks after itself.

    Returns:
        the shells that wait for the commands.
    """
    shells = []
    for attempt in attempts:
        with contextlib.suppress(FileNotFoundError):  # a searcher was killed before it made the directory
            attempt.early.touch()
    for one in _living(attempts):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(one.pid) == one.pid and one.name() == "sh":
                os.killpg(one.pid, signal.SIGTERM)
                shells.append(one)
    return shells


def kill(attempts: Sequence[Attempt], patience: float = 0.0) -> None:
    """End all their processes on this host, and wait for that; those elsewhere end with ``ringdance run``.

    Args:
        attempts: at trials.
        patience: seconds for those that end by themselves.
    """
    psutil.wait_procs(_living(attempts), timeout=patience)
    while living := _living(attempts):
        for one in living:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(living, timeout=0.2)


@dataclass
class Searcher:
    """Runs the trials of a study, from its main thread.

    Attributes:
        free: places for one trial each.
        launch: options of ``ringdance run``; None: the command itself is run, on this machine.
        exports: variables for the trials.
        devices: names of a host's GPUs by slot, if trials are to see only those of their slots.
        grace: seconds that a trial has to end after SIGTERM.
    """

    study: Study
    space: Space
    console: Console
    free: list[Place]
    launch: Sequence[str] | None
    exports: Mapping[str, str]
    devices: Sequence[str]
    grace: float
    _running: list[Attempt] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)  # begun, and to be started
    _failed: int = 0
    _signals: int = 0

    def run(self) -> int:
        """Run until the study has its trials; return the exit code."""
        heeded = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._signal) for number in heeded}
        running = partial(table, self.study, "RUNNING")
        live: Any = Live(get_renderable=running, console=self.console, transient=True)
        try:
            with live if self.console.is_terminal else contextlib.nullcontext():
                self._recover()
                while not self._signals and (self._start() or self._running):
                    time.sleep(_POLL_S)
                    for trial in [] if self._signals else list(self._running):
                        self._look(trial)
        finally:  # they stay unfinished in the study
            self._end([one for one in self._running if one.code() is None])
            kill(self._running, patience=_ALONE_S if self._signals < 2 else 0.0)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signals:
            self.console.print("Stopped; the same command goes on with the search.")
            return 130
        if self._given_up:
            text = f"{self._failed} trials have failed, and the search is given up (`failures:` in the file)"
            self.console.print(text, soft_wrap=True)
        return 1 if self._given_up or not self.study.best() else 0

    def _signal(self, *_: object) -> None:
        self._signals += 1

    @property
    def _given_up(self) -> bool:
        return self._failed >= self.space.failures

    # --- trials ------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take up what a searcher that was killed has left."""
        left = [self._attempt(trial.number) for trial in self.study.trials("RUNNING")]
        self._end([one for one in left if one.code() in (KILLED, TERMINATED)])
        kill(left, patience=_ALONE_S)
        for one in left:
            if one.code() in (KILLED, TERMINATED) and not one.stop.exists():
                self._set_aside(one)
                self._waiting.append(one.trial.number)
            else:
                self._finish(one)

    def _attempt(self, number: int | None, place: Place = ()) -> Attempt:
        trial, aim = self.study.trial(number), self.space.objective
        directory = self.study.directory / "trials" / f"{trial.number:04}"
        path = directory / ("log" if aim.line else "report.jsonl")
        if aim.file:
            path = Path(fill([aim.file], trial.params, directory)[0])
        return Attempt(trial, directory, Reader(aim, path), place)

    def _start(self) -> bool:
        """Start trials where there is room; return whether some are still to come."""
        while not self._given_up and (self._waiting or len(self.study.trials()) < self.space.trials):
            if not self.free:
                return True
            one = self._attempt(self._waiting.pop(0) if self._waiting else None, self.free.pop(0))
            directory, parameters = one.directory, one.trial.params
            shutil.rmtree(directory, ignore_errors=True)  # of a start that was cut short
            directory.mkdir(parents=True)
            (directory / "params.json").write_text(json.dumps(parameters, default=str) + "\n")
            known = self.space.parameters.items()
            environ = {it.env: as_text(parameters[name]) for name, it in known if it.env} | dict(self.exports)
            if self.devices:
                slots = sorted({slot for _, slot in one.place})
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[slot] for slot in slots)
            command = resolve_command(fill(self.study.facts["command"], parameters, directory))
            if self.launch is not None:
                command = [*run_options(one.place, environ), *self.launch, "--", *command]
            self._running.append(one)
            one.start(command, environ)
        return False

    def _look(self, one: Attempt) -> None:
        """Pass on what a trial reports, and see whether it has ended."""
        now = time.monotonic()
        if one.code() is not None:
            kill([one], patience=_ALONE_S)
            self._running.remove(one)
            self.free.append(one.place)
            self._finish(one)
        elif one.ends and now > one.ends[0][0]:
            one.ends.pop(0)[1]()
        elif not one.stop.exists() and self._passed_on(one):
            one.stop.touch()
            after = now + min(_STOP_S, self.grace)
            one.ends = [(after, partial(terminate, [one])), (after + self.grace, partial(kill, [one]))]

    def _passed_on(self, one: Attempt, ended: bool = False) -> bool:
        """Return whether a trial is to be pruned by what it has reported since the last call."""
        pruned = False
        for step, value in one.reader.new(ended):
            if step is not None and self.space.pruner["name"] != "none":  # each is a synced record
                one.trial.report(value, step)
                pruned = one.trial.should_prune() or pruned
        return pruned

    def _finish(self, one: Attempt) -> None:
        """Keep how a trial ended, or have one that was killed run again."""
        code, trial, reason = one.code() or 0, one.trial, ""
        self._passed_on(one, ended=True)
        if one.stop.exists():
            self.study.tell(trial, "PRUNED")
            return self._say(one, f"pruned after {len(one.reader.values)} reports")
        try:
            result = one.reader.result()
        except ValueError as error:
            reason = str(error)
        if code or reason:
            return self._fail(one, code, f"exit code {code}" if code else reason)
        self.study.tell(trial, "COMPLETE", result)
        self._say(one, f"{self.space.objective.name} {result:.6g}")

    def _fail(self, one: Attempt, code: int, reason: str) -> None:
        trial, log = one.trial, self._set_aside(one) / "log"
        if 128 < code <= 128 + signal.SIGRTMAX and "killed" not in trial.user_attrs:
            trial.set_user_attr("killed", code - 128)
            self._waiting.append(trial.number)
            return self._say(one, f"killed by signal {code - 128}, and started again ({log})")
        self._failed += bool(code or not one.reader.values)  # no number is normal where lr is too high
        trial.set_user_attr("reason", f"{reason} ({log})")
        self.study.tell(trial, "FAIL")
        self._say(one, f"failed: {reason} ({log})")

    def _set_aside(self, one: Attempt) -> Path:
        """Keep the directory of an attempt that failed; return where."""
        failed, name = self.study.directory / "failed", one.directory.name
        target = failed / f"{name}.{1 + len(list(failed.glob(f'{name}.*')))}"
        failed.mkdir(exist_ok=True)
        if one.directory.exists():
            one.directory.rename(target)
        return target

    def _end(self, attempts: Sequence[Attempt]) -> None:
        """End attempts, of which no result is taken. A second signal ends them at once."""
        shells, end = terminate(attempts), time.monotonic() + self.grace
        while shells and self._signals < 2 and time.monotonic() < end:
            _, shells = psutil.wait_procs(shells, timeout=_POLL_S)

    def _say(self, one: Attempt, text: str) -> None:
        parameters = ", ".join(f"{name} {short(value)}" for name, value in one.trial.params.items())
        self.console.print(f"trial {one.trial.number}: {text}; {parameters}", soft_wrap=True)
