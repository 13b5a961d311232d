"""A study on the disk: which trials there are, what they gave, and what to try next; by Optuna."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ringdance.errors import LaunchError, optional
from ringdance.search.space import Space, as_text

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

_CLASSES = {"sampler": {"tpe": "TPESampler", "random": "RandomSampler"},
            "pruner": {"none": "NopPruner", "median": "MedianPruner", "halving": "SuccessiveHalvingPruner",
                       "hyperband": "HyperbandPruner"}}  # fmt: skip
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


class Study:
    """Trials in a directory, for one searcher at a time.

    ``journal.log`` has Optuna's records, ``trials/NUMBER`` what a trial wrote, and ``failed/NUMBER.ATTEMPT``
    the same of attempts that failed.

    Attributes:
        study: Optuna's. Its user attributes are the space and the command.
    """

    def __init__(self, directory: Path, space: Space | None = None) -> None:
        """Open the study in `directory`; with a `space` for a searcher, which may make it, else to read.

        Raises:
            LaunchError: there is none, another searcher has it, or it is one of another space.
        """
        self._optuna = optuna = optional("optuna", LaunchError, "`ringdance search` needs Optuna")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", module=r"optuna|ringdance\.search")
        self.directory, self._space, journal = directory, space, directory / "journal.log"
        names: dict[str, Any] = {"study_name": "ringdance"}
        if space:
            self._sampler(0)  # wrong options are refused before anything is written
            names["pruner"] = _made(optuna.pruners, "pruner", space.pruner)
            names |= {"direction": space.objective.goal, "load_if_exists": True}
            self._take(journal)
        elif not journal.exists():
            raise LaunchError(f"{directory} is no study: `ringdance search SPACE.yaml` makes one")
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(journal))
            names["storage"] = self._storage = optuna.storages.JournalStorage(backend)
            self.study = (optuna.create_study if space else optuna.load_study)(**names)
        except (ValueError, KeyError) as error:
            raise LaunchError(f"{journal} is damaged, or no file of `ringdance search`: {error}") from None
        self._compare(space.definition() if space else {})

    def _take(self, journal: Path) -> None:
        """Keep other searchers out, and remove what one that was killed while it wrote has left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self.directory / "ringdance-search.lock"
        if not lock.exists() and any(self.directory.iterdir()):
            text = "has other files, and is no study; give --study a directory that is empty or new"
            raise LaunchError(f"{self.directory} {text}")
        self._lock = open(lock, "a+")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = "another `ringdance search` works on this study; wait for its end, or give another --study"
            raise LaunchError(f"{self.directory}: {text}") from None
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        if journal.exists() and not (data := journal.read_bytes()).endswith(b"\n"):
            os.truncate(journal, data.rfind(b"\n") + 1)

    def _compare(self, definition: Mapping[str, Any]) -> None:
        """Refuse to go on with parameters or an objective that earlier trials did not have; keep new ones."""
        for part, new in definition.items():
            old = self.facts.get(part, new)
            for name in old.keys() | new.keys():
                if old.get(name) != new.get(name):
                    text = f"{self.directory} is of another space: {name} was {old.get(name)} and is "
                    raise LaunchError(f"{text}{new.get(name)}; give --study DIRECTORY for a new study")
            self.study.set_user_attr(part, new)

    def keep(self, command: Sequence[str], launch: Sequence[str]) -> None:
        """Keep the command of trials from now on, and the words before it in a shell."""
        self.study.set_user_attr("launch", list(launch))
        self.study.set_user_attr("command", list(command))

    @property
    def facts(self) -> dict[str, Any]:
        """The study's parameters, objective, launch and command."""
        return self.study.user_attrs

    # --- trials ------------------------------------------------------------------------------------

    def trials(self, *states: str) -> list[FrozenTrial]:
        """Return the trials in these states ("COMPLETE", "PRUNED", "FAIL", "RUNNING"; default: in any)."""
        wanted = [self._optuna.trial.TrialState[state] for state in states]
        return self.study.get_trials(deepcopy=False, states=wanted or None)

    def best(self) -> FrozenTrial | None:
        """Return the trial with the best value, if any has finished."""
        return self.study.best_trial if self.trials("COMPLETE") else None

    def trial(self, number: int | None = None) -> Trial:
        """Return a trial that was begun, or begin one; parameters that it does not have yet are chosen."""
        assert self._space
        self.study.sampler = self._sampler(len(self.trials()) if number is None else number)
        if number is None:
            number = self.study.ask().number
        study = self._storage.get_study_id_from_name("ringdance")
        known = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        trial = self._optuna.trial.Trial(self.study, known)
        for name, one in self._space.parameters.items():
            getattr(trial, f"suggest_{one.kind}")(name, **one.options)
        return trial

    def _sampler(self, number: int) -> Any:
        """Return the sampler for a trial: its own random numbers, so that a resumed search repeats none."""
        assert self._space
        options = dict(self._space.sampler)
        if options.get("seed") is not None:
            options["seed"] += number
        return _made(self._optuna.samplers, "sampler", options)

    def tell(self, trial: Trial, state: str, value: float | None = None) -> None:
        """End a trial."""
        self.study.tell(trial, value, state=self._optuna.trial.TrialState[state])


def _made(module: Any, kind: str, options: Mapping[str, Any]) -> Any:
    """Make one of Optuna's samplers or pruners."""
    names = _CLASSES[kind]
    name, more = options["name"], {key: value for key, value in options.items() if key != "name"}
    if name not in names:
        raise LaunchError(f"{kind}: there is no {name!r}, only {', '.join(names)}")
    try:
        return getattr(module, names[name])(**more)
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{kind}: {name}: Optuna's {names[name]} refuses its options: {error}") from None


def headline(study: Study) -> str:
    """Return how far a study is, in one line."""
    counts = [f"{number} {word}" for state, word in STATES.items() if (number := len(study.trials(state)))]
    best, end = study.best(), ""
    if best:
        end = f"; best {study.facts['objective']['name']} {best.value:.6g}, trial {best.number}"
    return f"{len(study.trials())} trials: {', '.join(counts)}{end}"


def table(study: Study, *states: str) -> Table:
    """Return a table of the trials in these states; of those without a result, what the pruner saw last."""
    made = Table(title=headline(study), title_justify="left", box=SIMPLE_HEAD)
    names = list(study.facts["parameters"])
    for name in ("trial", "state", study.facts["objective"]["name"], "seconds", *names):
        made.add_column(name, justify="left" if name == "state" else "right")
    for one in study.trials(*states):
        reports, begun = one.intermediate_values, one.datetime_start or datetime.now()
        value = reports.get(one.last_step or 0) if one.value is None else one.value
        seconds = ((one.datetime_complete or datetime.now()) - begun).total_seconds()
        facts = one.number, STATES[one.state.name], "" if value is None else short(value)
        parameters = (short(one.params.get(name, "")) for name in names)
        made.add_row(*map(str, facts), f"{seconds:.0f}", *parameters)
    return made


def short(value: Any) -> str:
    """Return a parameter's value for people."""
    return f"{value:.5g}" if isinstance(value, float) else as_text(value)
