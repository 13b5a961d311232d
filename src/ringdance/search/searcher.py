"""Run trials side by side until there are enough."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ringdance.launch.spec import resolve_command
from ringdance.launch.system.signals import STOPPING
from ringdance.search.process import Place, Process, run_options
from ringdance.search.space import Reader, Space, as_text, fill
from ringdance.search.study import Study

_POLL_S = 0.1
_STOP_S = 5.0  # at most, for a report to end a trial that is pruned
_ALONE_S = 1.0  # for processes to end when the one that led them has
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


@dataclass
class _Running:
    """A trial; `ends` has what is done to end it, and when."""

    number: int
    process: Process
    reader: Reader
    parameters: Mapping[str, Any]
    place: Place = ()
    began: float = field(default_factory=time.monotonic)
    ends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)


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
    _running: list[_Running] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)  # begun, and to be started
    _failed: int = 0
    _signals: int = 0

    def run(self) -> int:
        """Run until the study has its trials; return the exit code."""
        heeded = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._signal) for number in heeded}
        live: Any = Live(get_renderable=self._table, console=self.console, transient=True)
        try:
            with live if self.console.is_terminal else contextlib.nullcontext():
                self._recover()
                while not self._signals and (self._start() or self._running):
                    time.sleep(_POLL_S)
                    for trial in list(self._running):
                        self._look(trial)
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signals:
            self.console.print("Stopped; the same command goes on with the search.")
            return 130
        return 1 if self._given_up or not self.study.best() else 0

    def _signal(self, *_: object) -> None:
        self._signals += 1

    @property
    def _given_up(self) -> bool:
        return self._failed >= self.space.failures

    # --- trials ------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take up what a searcher that was killed has left."""
        for number in [trial.number for trial in self.study.trials("RUNNING")]:
            trial = self._trial(number)
            ended = trial.process.exit.exists()
            if not ended:
                trial.process.terminate()
            trial.process.kill(patience=_ALONE_S if ended else self.grace)
            if ended:
                self._finish(trial)
            else:
                self._set_aside(trial)
                self._waiting.append(number)

    def _trial(self, number: int, place: Place = ()) -> _Running:
        directory, aim = self.study.directory / "trials" / f"{number:04}", self.space.objective
        parameters = self.study.parameters(number)
        path = directory / ("log" if aim.line else "report.jsonl")
        if aim.file:
            path = Path(fill([aim.file], parameters, directory)[0])
        process = Process(directory, f"{self.study.facts['id']}:{number}")
        return _Running(number, process, Reader(aim, path), parameters, place)

    def _start(self) -> bool:
        """Start trials where there is room; return whether some are still to come."""
        while not self._given_up and (self._waiting or len(self.study.trials()) < self.space.trials):
            if not self.free:
                return True
            number = self._waiting.pop(0) if self._waiting else self.study.ask()
            trial = self._trial(number, self.free.pop(0))
            directory = trial.process.directory
            shutil.rmtree(directory, ignore_errors=True)  # of a start that was cut short
            directory.mkdir(parents=True)
            (directory / "params.json").write_text(json.dumps(trial.parameters, default=str) + "\n")
            named = {one.env: as_text(trial.parameters[name]) for name, one in self.space.parameters.items()}
            environ = {name: value for name, value in named.items() if name} | dict(self.exports)
            if self.devices:
                slots = sorted({slot for _, slot in trial.place})
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices[slot] for slot in slots)
            command = resolve_command(fill(self.study.facts["command"], trial.parameters, directory))
            if self.launch is not None:
                command = [*run_options(trial.place, environ), *self.launch, "--", *command]
            self._running.append(trial)
            trial.process.start(command, environ)
        return False

    def _look(self, trial: _Running) -> None:
        """Pass on what a trial reports, and see whether it has ended."""
        code, now, process = trial.process.code(), time.monotonic(), trial.process
        if code is not None:
            process.kill(patience=_ALONE_S)
            self._running.remove(trial)
            self.free.append(trial.place)
            self._finish(trial)
        elif trial.ends and now > trial.ends[0][0]:
            trial.ends.pop(0)[1]()
        elif not process.stop.exists() and self._passed_on(trial):
            process.stop.touch()
            after = now + min(_STOP_S, self.grace)
            trial.ends = [(after, process.terminate), (after + self.grace, process.kill)]

    def _passed_on(self, trial: _Running, ended: bool = False) -> bool:
        """Return whether a trial is to be pruned by what it has reported since the last call."""
        return any([self.study.report(trial.number, *one) for one in trial.reader.new(ended)])

    def _finish(self, trial: _Running) -> None:
        """Keep how a trial ended, or have one that was killed run again."""
        number, code = trial.number, trial.process.code() or 0
        self._passed_on(trial, ended=True)
        if trial.process.stop.exists():
            self.study.tell(number, "PRUNED")
            return self._say(trial, f"pruned after {len(trial.reader.values)} reports")
        reason = f"exit code {code}"
        if code == 0:
            try:
                self.study.tell(number, "COMPLETE", trial.reader.result())
                return self._say(trial, f"{self.space.objective.name} {trial.reader.result():.6g}")
            except ValueError as error:
                reason = str(error)
        log = self._aside(trial) / "log"
        if code > 128 and "killed" not in self.study.trials()[number].user_attrs:
            self._set_aside(trial)
            self.study.note(number, "killed", code - 128)
            self._waiting.append(number)
            return self._say(trial, f"killed by signal {code - 128}, and started again ({log})")
        self._failed += 1
        reason = f"{reason.replace(str(trial.process.directory), str(log.parent))} ({log})"
        self.study.note(number, "reason", reason)
        self.study.tell(number, "FAIL")
        self._set_aside(trial)
        self._say(trial, f"failed: {reason}")
        if self._given_up:
            text = f"{self._failed} trials have failed, and the search is given up (`failures:` in the file)"
            self.console.print(text, soft_wrap=True)

    def _aside(self, trial: _Running) -> Path:
        """Return where an attempt's directory is kept if it failed."""
        failed, name = self.study.directory / "failed", trial.process.directory.name
        return failed / f"{name}.{1 + len(list(failed.glob(f'{name}.*')))}"

    def _set_aside(self, trial: _Running) -> None:
        target = self._aside(trial)
        target.parent.mkdir(exist_ok=True)
        if trial.process.directory.exists():
            trial.process.directory.rename(target)

    def _end_all(self) -> None:
        """End the trials that run; they stay unfinished in the study. A second signal ends them at once."""
        ended = {trial.number for trial in self._running if trial.process.code() is not None}
        for trial in self._running:
            trial.process.terminate()
        end = time.monotonic() + self.grace
        while any(trial.process.code() is None for trial in self._running):
            if self._signals > 1 or time.monotonic() > end:
                break
            time.sleep(_POLL_S)
        for trial in self._running:
            trial.process.kill(patience=_ALONE_S if self._signals < 2 else 0.0)
            if trial.number not in ended:  # the code of what ended it is no result
                trial.process.exit.unlink(missing_ok=True)

    # --- what is shown -----------------------------------------------------------------------------

    def _say(self, trial: _Running, text: str) -> None:
        parameters = ", ".join(f"{name} {short(value)}" for name, value in trial.parameters.items())
        text = f"trial {trial.number}: {text}; {parameters}"
        self.console.print(text, soft_wrap=True, markup=False)

    def _table(self) -> Table:
        table = Table(title=headline(self.study), title_justify="left", box=None)
        for name in ("trial", "place", "seconds", "reports", "last", *self.space.parameters):
            table.add_column(name, justify="right")
        for one in list(self._running):
            values, hosts = one.reader.values, ",".join(dict.fromkeys(host for host, _ in one.place))
            last = f"{values[-1]:.5g}" if values else ""
            facts = str(one.number), hosts, f"{time.monotonic() - one.began:.0f}", str(len(values)), last
            table.add_row(*facts, *map(short, one.parameters.values()))
        return table


def headline(study: Study) -> str:
    """Return how far a study is, in one line."""
    counts = [f"{number} {word}" for state, word in STATES.items() if (number := len(study.trials(state)))]
    name, best = study.facts["space"]["objective"]["name"], study.best()
    end = f"; best {name} {best.value:.6g}, trial {best.number}" if best else ""
    return f"{len(study.trials())} trials: {', '.join(counts)}{end}"


def short(value: Any) -> str:
    """Return a parameter's value for people."""
    return f"{value:.4g}" if isinstance(value, float) else as_text(value)
