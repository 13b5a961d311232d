"""A study on disk. Optuna stores its trials and their results, and chooses the next parameters."""

from __future__ import annotations

import fcntl
import os
import random
import shlex
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ringdance.errors import LaunchError, optional
from ringdance.host.files import check_regular
from ringdance.tools.search.space import Space, as_text, parse_space

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

_NAME = "ringdance"
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


class Study:
    """A study stored in a directory. Only one searcher can use the study at a time.

    ``journal.log`` contains Optuna's records. ``trials/NUMBER`` contains the files of a trial, and
    ``failed/NUMBER.ATTEMPT`` the files of a failed attempt.

    Attributes:
        study: The Optuna study. Its user attributes store the space's definition and the command with
            placeholders. Each trial's user attributes store the command that was run.
        space: The ``space`` argument, or a space built from the stored definition.
        exhausted: True once the sampler cannot suggest anything new.
    """

    def __init__(self, directory: Path, space: Space | None = None, command: Sequence[str] = ()) -> None:
        """Open the study in ``directory``.

        If ``space`` is given, the study is opened for running trials, and created if it does not exist.
        Otherwise, it is opened for reading.

        Raises:
            LaunchError: The study does not exist, is in use, or belongs to a different space or command.
        """
        self._optuna = optuna = optional("optuna", LaunchError, "`ringdance search` needs Optuna")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", module=r"optuna|ringdance\.search")
        self.directory, journal = directory, directory / "journal.log"
        check_regular(journal)
        if space:
            self._made("sampler", space.sampler)  # reject invalid options before writing anything
            self._made("pruner", space.pruner)
            self._take(journal)
        elif not journal.exists():
            raise LaunchError(f"{directory} is not a study. Create one with `ringdance search SPACE.yaml`")
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(journal))
            self._storage = storage = optuna.storages.JournalStorage(backend)
            if space:
                aim = space.objective.goal
                optuna.create_study(storage=storage, study_name=_NAME, direction=aim, load_if_exists=True)
            self.study = optuna.load_study(storage=storage, study_name=_NAME)
            if space and not self.study.user_attrs:
                self.study.set_user_attr("definition", space.definition())
            definition = self.study.user_attrs["definition"]
            self.space = space or parse_space(definition)
        except (ValueError, TypeError, LookupError, AssertionError, RecursionError) as error:
            raise LaunchError(
                f"{journal} is damaged, or was not written by `ringdance search`: {error}"
            ) from None
        if (new := self.space.definition()) != definition:
            text = f"{directory} belongs to another search space: {definition}, not {new}"
            raise LaunchError(f"{text}. Use --study DIRECTORY for a new study")
        if space:
            self._check(journal, list(command))
        self.study.pruner = self._made("pruner", self.space.pruner)
        self.study.stop = self._stop  # Optuna's own stop() works only inside optimize()
        self.exhausted = False

    def _check(self, journal: Path, command: Sequence[str]) -> None:
        """Raise LaunchError if the journal has lost trials, or if the study belongs to another command."""
        known = len(self.trials())
        names = (path.name for path in self.directory.glob("trials/*"))
        if any(name.isdecimal() and int(name) >= known for name in names):
            text = f"is damaged: it has {known} trials, but {self.directory / 'trials'} has later ones"
            raise LaunchError(f"{journal} {text}. Use --study DIRECTORY for a new study")
        before = self.study.user_attrs.get("command")
        if before and command and before != command and self.trials("COMPLETE", "PRUNED"):
            text = f"belongs to another command: `{shlex.join(before)}`, not `{shlex.join(command)}`"
            raise LaunchError(f"{self.directory} {text}. Use --study DIRECTORY for a new study")
        if command and before != command:
            self.study.set_user_attr("command", command)

    def _stop(self) -> None:
        self.exhausted = True

    def _take(self, journal: Path) -> None:
        """Lock the study, and remove an incomplete record left behind by a killed searcher."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self.directory / "ringdance-search.lock"
        if not lock.exists() and any(self.directory.iterdir()):
            text = "contains other files and is not a study. Pass a new or empty directory with --study."
            raise LaunchError(f"{self.directory} {text}")
        self._lock = open(lock, "a+")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = "another `ringdance search` is using this study. Wait until it exits, or change --study."
            raise LaunchError(f"{self.directory}: {text}") from None
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        if journal.exists() and not (data := journal.read_bytes()).endswith(b"\n"):
            os.truncate(journal, data.rfind(b"\n") + 1)

    def _made(self, kind: str, options: Mapping[str, Any]) -> Any:
        """Create an Optuna sampler or pruner from its short name, such as ``tpe`` for TPESampler."""
        module, options = getattr(self._optuna, f"{kind}s"), dict(options)
        ends = kind.capitalize()
        known = {name.removesuffix(ends).lower(): name for name in dir(module) if name.endswith(ends)}
        name = options.pop("name")
        if name not in known:
            raise LaunchError(f"{kind}: {name!r} is not known. Use one of {', '.join(known)}")
        try:
            return getattr(module, known[name])(**options)
        except (TypeError, ValueError) as error:
            raise LaunchError(f"{kind}: {name}: {error}") from None

    # --- trials ------------------------------------------------------------------------------------

    def trials(self, *states: str) -> list[FrozenTrial]:
        """Return the trials in these states: "COMPLETE", "PRUNED", "FAIL", "RUNNING". Default: all trials."""
        wanted = [self._optuna.trial.TrialState[state] for state in states]
        return self.study.get_trials(deepcopy=False, states=wanted or None)

    def best(self) -> FrozenTrial | None:
        """Return the trial with the best value, or None if no trial is complete."""
        return self.study.best_trial if self.trials("COMPLETE") else None

    def trial(self, number: int | None = None) -> Trial:
        """Return trial ``number``, or a new trial if None, with a value for each of its parameters."""
        # Each trial has its own random seed, so that a resumed search, or a search with the next higher seed,
        # does not repeat the same random numbers.
        options = dict(self.space.sampler)
        if options.get("seed") is not None:
            own = f"{options['seed']} {len(self.trials()) if number is None else number}"
            options["seed"] = random.Random(own).getrandbits(32)
        self.study.sampler = self._made("sampler", options)
        if number is None:
            number = self.study.ask().number
        study = self._storage.get_study_id_from_name(_NAME)
        known = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        trial = self._optuna.trial.Trial(self.study, known)
        try:
            for name, one in self.space.parameters.items():
                getattr(trial, f"suggest_{one.kind}")(name, **one.options)
        except ImportError as error:
            raise LaunchError(f"sampler: {options['name']}: {error}") from None
        return trial

    def tell(self, trial: Trial, state: str, value: float | None = None) -> None:
        """Record the final state and value of a trial."""
        self.study.tell(trial, value, state=self._optuna.trial.TrialState[state])


def headline(study: Study) -> str:
    """Summarize a study's progress in one line."""
    counts = [f"{number} {word}" for state, word in STATES.items() if (number := len(study.trials(state)))]
    best = study.best()
    end = f"; best {study.space.objective.name} {best.value:.6g}, trial {best.number}" if best else ""
    total = len(study.trials())
    return f"{total} trial{'s' * (total != 1)}: {', '.join(counts)}{end}"


def table(study: Study, *states: str) -> Table:
    """Return a table of the trials in the given states. Shows the last report of trials without a result."""
    made = Table(title=headline(study), title_justify="left", box=SIMPLE_HEAD)
    names = list(study.space.parameters)
    for name in ("trial", "state", study.space.objective.name, "seconds", *names):
        made.add_column(name, justify="left" if name == "state" else "right")
    for trial in study.trials(*states):
        reports, begun = trial.intermediate_values, trial.datetime_start or datetime.now()
        value = reports.get(trial.last_step or 0) if trial.value is None else trial.value
        seconds = ((trial.datetime_complete or datetime.now()) - begun).total_seconds()
        parameters = [trial.params.get(name, "") for name in names]
        cells = trial.number, STATES[trial.state.name], "" if value is None else value, round(seconds)
        made.add_row(*map(short, (*cells, *parameters)))
    return made


def short(value: Any) -> str:
    """Format a value for display, with up to five significant digits."""
    return f"{value:.5g}" if isinstance(value, float) else as_text(value)
