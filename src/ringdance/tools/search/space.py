"""The file of a search: parameters, objective, and how the space is searched."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from ringdance.errors import LaunchError, optional
from ringdance.host.files import read_regular, read_yaml

OWN = ("trial", "dir", "params", "slots")
"""Placeholders of every trial: its number and directory, a JSON file with all parameters, and its slots."""
_NAME = r"[A-Za-z_]\w*"
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_COUNT = r"[1-9]\d*", "a whole number, 1 or more"
# What values of the file are by their repr, and in words.
_FORMS = {
    "trials": _COUNT, "failures": _COUNT, "goal": ("'(maximize|minimize)'", "maximize or minimize"),
    "take": ("'(last|best)'", "last or best"),
}  # fmt: skip


class Parameter(NamedTuple):
    """A parameter of a space.

    Attributes:
        kind: "float", "int" or "categorical": which of Optuna's ``suggest_`` methods chooses its value.
        options: of that method: low, high, step and log, or choices.
    """

    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Objective:
    """What is to be as large or as small as possible, and where a trial leaves it.

    Attributes:
        name: for people.
        goal: "maximize" or "minimize".
        line: regular expression for lines of the output: the group ``value``, else the first, is the number;
            a group ``step`` is the step. Or "": what the script gives to ``ringdance.report``.
        take: the "last" value of a trial, or its "best".
    """

    name: str = "objective"
    goal: str = "minimize"
    line: str = ""
    take: str = "last"


@dataclass(frozen=True)
class Space:
    """A file of a search.

    Attributes:
        parameters: by name.
        objective: what is searched for.
        trials: how many, failed ones included.
        failures: after so many failed trials the search is given up.
        sampler, pruner: name and options of Optuna's.
    """

    parameters: Mapping[str, Parameter]
    objective: Objective
    trials: int = 20
    failures: int = 5
    sampler: Mapping[str, Any] = field(default_factory=lambda: {"name": "tpe"})
    pruner: Mapping[str, Any] = field(default_factory=lambda: {"name": "nop"})

    def definition(self) -> dict[str, Any]:
        """Return what all trials of a study have in common, as a file of a search has it."""
        aim = {key: value for key, value in asdict(self.objective).items() if value}
        return {"parameters": {name: one.options for name, one in self.parameters.items()}, "objective": aim}


def read_space(path: Path) -> Space:
    """Read a file of a search. Raises LaunchError if something in it is wrong."""
    try:
        return parse_space(read_yaml(read_regular(path)))
    except ValueError as error:
        raise LaunchError(f"{path}: {error}") from None


def parse_space(found: Any) -> Space:
    """Build a space of a file's content. Raises ValueError with what is wrong and what to write."""
    options = _checked("the file", found, [one.name for one in fields(Space)])
    parameters = _checked("parameters", options.pop("parameters", {}))
    if not parameters:
        raise ValueError("the space is empty: write `parameters:` with, say, lr: {low: 0.01, high: 1.0}")
    aim = _checked("objective", options.pop("objective", {}), [one.name for one in fields(Objective)])
    if "line" in aim and not value_group(str(aim["line"])):
        wanted = "a regular expression with a group for the number, such as 'loss (\\S+)'"
        raise ValueError(f"objective: line must be {wanted}, and is {aim['line']!r}")
    for key in options.keys() & {"sampler", "pruner"}:
        value = options[key]
        options[key] = {"name": "", **_checked(key, {"name": value} if isinstance(value, str) else value)}
    objective = Objective(**{key: str(value) for key, value in aim.items()})
    return Space({name: _parameter(name, one) for name, one in parameters.items()}, objective, **options)


def _checked(name: str, found: Any, known: Sequence[str] = ()) -> dict[str, Any]:
    """Return a mapping in the file, whose keys are known, unless any may be, and whose values are right."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must have lines `key: value`, and is {found!r}")
    for key, value in found.items() if known else ():
        if key not in known:
            raise ValueError(f"{name}: unknown key {key!r}; known are {', '.join(known)}")
        form, words = _FORMS.get(key, (".*", ""))
        if not re.fullmatch(form, repr(value), re.ASCII | re.DOTALL):
            raise ValueError(f"{name}: {key} must be {words}, and is {value!r}")
    return dict(found)


def _parameter(name: Any, found: Any) -> Parameter:
    distributions = optional("optuna", LaunchError, "`ringdance search` needs Optuna").distributions
    if not re.fullmatch(_NAME, str(name), re.ASCII) or name in OWN:
        raise ValueError(f"{name!r} is no name: use letters, digits and _, and none of {', '.join(OWN)}")
    found = {"choices": found} if isinstance(found, list) else found
    choices = isinstance(found, Mapping) and "choices" in found
    options = _checked(name, found, ["choices"] if choices else ["low", "high", "step", "log"])
    try:
        numbers: list[Any] = [options.get(key) for key in ("low", "high", *options.keys() & {"step"})]
        if not choices and not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):
            raise ValueError("low, high and step must be finite numbers")
        if choices and not isinstance(options["choices"], list):
            raise ValueError("choices must be a list")
        kind = "categorical" if choices else "float" if float in map(type, numbers) else "int"
        # Optuna writes down the first of equal ones, whichever was tried.
        same = [one for one in options.get("choices", ()) if options["choices"].count(one) > 1]
        if same:
            raise ValueError(f"{' and '.join(map(as_text, same))} are the same to Optuna")
        getattr(distributions, f"{kind.capitalize()}Distribution")(**options)
    except (ValueError, TypeError) as error:
        ways = "{low: 0.01, high: 1, log: true}, with step: in place of log:, or [a, list, of values]"
        raise ValueError(f"{name}: {error}; write {ways}") from None
    return Parameter(kind, options)


# --- commands --------------------------------------------------------------------------------------


def check_command(space: Space, command: Sequence[str]) -> None:
    """Raise a LaunchError if a parameter gets to no trial."""
    used = set(_PLACEHOLDER.findall(" ".join(command)))
    if lost := [name for name in space.parameters if not used & {name, "params"}]:
        text = f"parameter {', '.join(lost)} gets to no trial: write {{{lost[0]}}} into the command, as in "
        raise LaunchError(text + "`env LR={lr} python train.py`, or {params} for a JSON file with them all")


def fill(texts: Sequence[str], values: Mapping[str, Any], directory: Path, slots: str) -> list[str]:
    """Put a trial's parameters, number, directory, whose name is the number, and slots into texts.

    Other names in braces stay.
    """
    own = {"trial": str(int(directory.name)), "dir": str(directory), "slots": slots}
    own["params"] = str(directory / "params.json")
    known = {name: as_text(value) for name, value in values.items()} | own
    return [_PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), text) for text in texts]


def as_text(value: Any) -> str:
    """Return a parameter's value as a command or a variable has it: `true`, `0.01`, a text as it is."""
    return value if isinstance(value, str) else json.dumps(value)


# --- values of a trial -----------------------------------------------------------------------------


def value_group(line: str) -> int:
    """Return the group of the number: ``value``, else the first that is not ``step``; 0 if there is none."""
    try:
        pattern = re.compile(line)
    except re.error:
        return 0
    others = set(range(1, pattern.groups + 1)) - {pattern.groupindex.get("step")}
    return pattern.groupindex.get("value") or min(others, default=0)


class Reader:
    """Reads the objective's values in a growing file: the output, or reports."""

    def __init__(self, objective: Objective, path: Path) -> None:
        self._objective, self._path, self._offset = objective, path, 0
        self.values: list[float] = []

    def new(self, ended: bool = False) -> list[tuple[int, float]]:
        """Return steps and values since the last call; also of an unended line if the trial has ended."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data if ended else data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        found = []
        for line in data.decode(errors="replace").splitlines():
            # Those of another line, and of what is no number.
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError):
                step, value = self._parse(line)
                found.append((len(self.values) if step is None else max(0, int(step)), float(value)))
                self.values.append(found[-1][1])
        return found

    def _parse(self, line: str) -> tuple[Any, Any]:
        aim = self._objective
        if aim.line:
            match: Any = re.search(aim.line, line)
            return match.groupdict().get("step"), match[value_group(aim.line)]
        record = json.loads(line)
        return record.get("step"), record["value"]

    def result(self) -> tuple[float, str]:
        """Return the trial's objective, and why it has none, else ""."""
        aim, numbers = self._objective, list(filter(math.isfinite, self.values))
        if not self.values:
            return math.nan, f"no {aim.name} by {aim.line or 'ringdance.report'} was found"
        if aim.take == "best" and numbers:
            return max(numbers) if aim.goal == "maximize" else min(numbers), ""
        last = self.values[-1]
        return last, "" if math.isfinite(last) else f"{aim.name} is {last}"
