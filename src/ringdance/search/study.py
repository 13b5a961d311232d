"""A study on the disk: which trials there are, what they gave, and what to try next; by Optuna."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringdance.errors import LaunchError, optional
from ringdance.search.space import Space, near

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}
_PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "halving": "SuccessiveHalvingPruner",
            "hyperband": "HyperbandPruner"}  # fmt: skip


class Study:
    """Trials in a directory, for one searcher at a time.

    ``study.json`` has the space, ``journal.log`` Optuna's records, ``trials/NUMBER`` what a trial wrote, and
    ``failed/NUMBER.ATTEMPT`` the same of attempts that failed.

    Attributes:
        facts: what ``study.json`` has: the study's id, space and command, and the host of its last searcher.
    """

    def __init__(self, directory: Path, space: Space | None = None) -> None:
        """Open the study in `directory`; with a `space` for a searcher, which may make it, else to read.

        Raises:
            LaunchError: there is none, another searcher has it, or it is one of another space.
        """
        self._optuna = optional("optuna", LaunchError, "`ringdance search` needs Optuna")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        warnings.filterwarnings("ignore", module="optuna")
        self.directory, self._space, journal = directory, space, directory / "journal.log"
        self._sampler: Mapping[str, Any] = space.sampler if space else {"name": "tpe"}
        self.sampler(0)  # wrong options are refused before anything is written
        options = space.pruner if space else {"name": "none"}
        pruner = _made(self._optuna.pruners, _PRUNERS, "pruner", options)
        if space:
            self._take(journal)
        self.facts = self._read(space)
        backend = self._optuna.storages.journal.JournalFileBackend
        try:
            self._storage = self._optuna.storages.JournalStorage(backend(str(journal)))
            names = {"study_name": "ringdance", "storage": self._storage, "pruner": pruner}
            if space:
                make = self._optuna.create_study
                self.study = make(**names, direction=space.objective.goal, load_if_exists=True)
            else:
                self.study = self._optuna.load_study(**names)
            self._id = self._storage.get_study_id_from_name("ringdance")
        except (ValueError, KeyError) as error:
            raise LaunchError(f"{journal} is damaged, or no file of `ringdance search`: {error}") from None

    def _take(self, journal: Path) -> None:
        """Keep other searchers out, and remove what one that was killed while it wrote has left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{self.directory}: another `ringdance search` works on this study"
            raise LaunchError(f"{text}; wait for its end, or give another --study DIRECTORY") from None
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        if journal.exists() and not (data := journal.read_bytes()).endswith(b"\n"):
            os.truncate(journal, data.rfind(b"\n") + 1)

    def _read(self, space: Space | None) -> dict[str, Any]:
        path = self.directory / "study.json"
        if not path.exists():
            if space is None:
                raise LaunchError(f"{self.directory} is no study: `ringdance search SPACE.yaml` makes one")
            return {"id": uuid.uuid4().hex[:12], "space": space.definition(), "host": ""}
        try:
            found = json.loads(path.read_text())
            old = {**found["space"]["parameters"], "the objective": found["space"]["objective"]}
            now = space.definition() if space else found["space"]
            new = {**now["parameters"], "the objective": now["objective"]}
            _ = found["id"], found["command"], found["launch"], found["host"]
        except (ValueError, KeyError, TypeError):
            raise LaunchError(f"{path} is not what `ringdance search` writes; give another --study") from None
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                text = f"{path} is of another space: {name} was {old.get(name)} and is {new.get(name)}"
                raise LaunchError(text + "; give --study DIRECTORY for a new study")
        return found

    def write(self, command: Sequence[str], launch: Sequence[str]) -> None:
        """Keep the command of trials from now on, and the words before it in a shell."""
        host = os.uname().nodename
        if self.facts["host"] not in ("", host) and self.trials("RUNNING"):
            text = f"trials of {self.directory} were started on {self.facts['host']} and may still run: "
            raise LaunchError(f"{text}go on there, or, if it is down, write {host} for it into study.json")
        self.facts |= {"command": list(command), "launch": list(launch), "host": host}
        new = self.directory / "study.new"
        new.write_text(json.dumps(self.facts, indent=1) + "\n")
        new.replace(self.directory / "study.json")

    # --- trials ------------------------------------------------------------------------------------

    def trials(self, *states: str) -> list[FrozenTrial]:
        """Return the trials in these states ("COMPLETE", "PRUNED", "FAIL", "RUNNING"; default: in any)."""
        wanted = [self._optuna.trial.TrialState[state] for state in states]
        return self.study.get_trials(deepcopy=False, states=wanted or None)

    def best(self) -> FrozenTrial | None:
        """Return the trial with the best value, if any has finished."""
        return self.study.best_trial if self.trials("COMPLETE") else None

    def sampler(self, number: int) -> Any:
        """Return the sampler for a trial: its own random numbers, so that a resumed search repeats none."""
        seed = self._sampler.get("seed")
        more = {} if seed is None else {"seed": seed + number}
        return _made(self._optuna.samplers, _SAMPLERS, "sampler", {**self._sampler, **more})

    def ask(self) -> int:
        """Begin a new trial; return its number."""
        self.study.sampler = self.sampler(len(self.trials()))
        return self.study.ask().number

    def parameters(self, number: int) -> dict[str, Any]:
        """Return a running trial's parameters; those that it does not have yet are chosen."""
        trial = self._optuna.trial.Trial(self.study, self._trial(number))
        known = self._space.parameters.items() if self._space else ()
        return {name: getattr(trial, f"suggest_{one.kind}")(name, **one.options) for name, one in known}

    def _trial(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def note(self, number: int, key: str, value: Any) -> None:
        """Keep a fact about a running trial."""
        self._storage.set_trial_user_attr(self._trial(number), key, value)

    def report(self, number: int, step: int, value: float) -> bool:
        """Keep what a running trial reports; return whether it is to be pruned."""
        trial = self._trial(number)
        self._storage.set_trial_intermediate_value(trial, step, value)
        return self.study.pruner.prune(self.study, self._storage.get_trial(trial))

    def tell(self, number: int, state: str, value: float | None = None) -> None:
        """End a trial."""
        self.study.tell(number, value, state=self._optuna.trial.TrialState[state])


def _made(module: Any, names: Mapping[str, str], kind: str, options: Mapping[str, Any]) -> Any:
    """Make one of Optuna's samplers or pruners."""
    name = options["name"]
    if name not in names:
        raise LaunchError(f"{kind}: there is no {name!r}{near(name, names)}, only {', '.join(names)}")
    try:
        return getattr(module, names[name])(**{key: value for key, value in options.items() if key != "name"})
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{kind}: {name}: Optuna's {names[name]} refuses its options: {error}") from None
