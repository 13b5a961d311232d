"""The file of a search: parameters, objective, and how the space is searched."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError, optional

OWN = ("trial", "dir", "params")
"""Placeholders that every trial has: its number, its directory, and a JSON file with its parameters."""
_PLACEHOLDER = re.compile(r"\{\{\w+\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a space.

    Attributes:
        kind: "float", "int" or "categorical": which of Optuna's ``suggest_`` methods chooses its value.
        options: of that method: low, high, step and log, or choices.
        env: variable in which a trial gets the value, or "".
    """

    kind: str
    options: Mapping[str, Any]
    env: str = ""


@dataclass(frozen=True)
class Objective:
    """What is to be as large or as small as possible, and where a trial leaves it.

    Attributes:
        name: for people, and the key in `file`.
        goal: "maximize" or "minimize".
        line: regular expression for lines of the output: the group ``value``, else the first, is the number;
            a group ``step`` is the step. Or "".
        file: JSON lines with the keys `name` and ``step``; placeholders are filled in. Or "": what the script
            gives to ``ringdance.report``.
        take: the "last" value of a trial, or its "best".
    """

    name: str = "objective"
    goal: str = "minimize"
    line: str = ""
    file: str = ""
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
        kubernetes: options of ``ringdance k8s manifest`` for the trials of a Katib experiment.
    """

    parameters: Mapping[str, Parameter]
    objective: Objective
    trials: int = 20
    failures: int = 5
    sampler: Mapping[str, Any] = field(default_factory=lambda: {"name": "tpe"})
    pruner: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    kubernetes: Mapping[str, Any] = field(default_factory=dict)

    def definition(self) -> dict[str, Any]:
        """Return what all trials of a study have in common, as JSON has it."""
        parameters = {name: asdict(one) for name, one in self.parameters.items()}
        made = {"parameters": parameters, "objective": asdict(self.objective)}
        return json.loads(json.dumps(made, default=str))


def read_space(path: Path) -> Space:
    """Read a file of a search. Raises LaunchError if something in it is wrong."""
    yaml = optional("yaml", LaunchError, f"{path} is YAML, which needs PyYAML", "pyyaml")
    try:
        return parse_space(yaml.safe_load(path.read_bytes()))
    except (ValueError, yaml.YAMLError) as error:
        raise LaunchError(f"{path}: {' '.join(str(error).split())}") from None


def parse_space(found: Any) -> Space:
    """Build a space of a file's content. Raises ValueError with what is wrong and what to write."""
    found = _mapping("the file", found, [one.name for one in fields(Space)])
    parameters = found.pop("parameters", None)
    _require(parameters, "the space is empty: write `parameters:` with, say, lr: {low: 0.01, high: 1.0}")
    for name in _mapping("parameters", parameters):
        known = isinstance(name, str) and _NAME.fullmatch(name) and name not in OWN
        _require(known, f"{name!r} is no name: use letters, digits and _, and none of {', '.join(OWN)}")
    for key in found.keys() & {"trials", "failures"}:
        good = type(found[key]) is int and found[key] > 0
        _require(good, f"{key}: {found[key]!r} is not a number of trials, 1 or more")
    for key in found.keys() & {"sampler", "pruner"}:
        named = {"name": found[key]} if isinstance(found[key], str) else _mapping(key, found[key])
        good = isinstance(named.get("name"), str)
        _require(good, f"{key}: write its name, or `name:` and options of Optuna's class")
        found[key] = named
    found["kubernetes"] = _mapping("kubernetes", found.get("kubernetes", {}))
    found["objective"] = _objective(found.get("objective", {}))
    return Space({name: _parameter(name, one) for name, one in parameters.items()}, **found)


def _require(good: Any, text: str) -> None:
    if not good:
        raise ValueError(text)


def _mapping(name: str, found: Any, known: Sequence[str] = ()) -> dict[str, Any]:
    _require(isinstance(found, Mapping), f"{name} must have lines `key: value`, and is {found!r}")
    for key in found:
        text = f"{name}: unknown key {key!r}{near(str(key), known)}; known are {', '.join(known)}"
        _require(not known or key in known, text)
    return dict(found)


def near(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" if `word` is like one of those known, else ""."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def _parameter(name: str, found: Any) -> Parameter:
    distributions = optional("optuna", LaunchError, "`ringdance search` needs Optuna").distributions
    if isinstance(found, list):
        found = {"values": found}
    options = _mapping(name, found, ("values", "low", "high", "log", "step", "env"))
    env = options.pop("env", "")
    good = env == "" or _NAME.fullmatch(str(env))
    _require(good, f"{name}: {env!r} cannot be the name of a variable")
    for key in options.keys() & {"low", "high", "step"}:
        try:  # YAML takes 1e-4 for a text: it wants 1.0e-4
            options[key] = float(options[key]) if not isinstance(options[key], int) else options[key]
        except (ValueError, TypeError):
            raise ValueError(f"{name}: {key} must be a number, and is {options[key]!r}") from None
    if "values" in options:
        options["choices"] = options.pop("values")
    numbers = [value for value in options.values() if not isinstance(value, bool)]
    kind = "int" if all(type(number) is int for number in numbers) else "float"
    kind = "categorical" if "choices" in options else kind
    try:
        getattr(distributions, f"{kind.capitalize()}Distribution")(**options)
    except (ValueError, TypeError) as error:
        ways = "{low: 0.01, high: 1, log: true}, with step: in place of log:, or [a, list, of values]"
        raise ValueError(f"{name}: {str(error).rstrip('.').replace('`', '')}; write {ways}") from None
    return Parameter(kind, options, env)


def _objective(found: Any) -> Objective:
    options = _mapping("objective", found, [one.name for one in fields(Objective)])
    made = Objective(**{key: str(value) for key, value in options.items()})
    for key, known in (("goal", ("maximize", "minimize")), ("take", ("last", "best"))):
        found = getattr(made, key)
        _require(found in known, f"objective: {key} must be {' or '.join(known)}, and is {found!r}")
    _require(not (made.line and made.file), "objective: give a line or a file, not both")
    try:
        groups = re.compile(made.line).groups
    except re.error as error:
        raise ValueError(f"objective: line {made.line!r} is no regular expression: {error}") from None
    text = f"objective: line {made.line!r} has no group: write the number as (\\S+)"
    _require(groups or not made.line, text)
    return made


# --- commands --------------------------------------------------------------------------------------


def check_command(space: Space, command: Sequence[str]) -> None:
    """Raise a LaunchError if a placeholder is no parameter, or if a parameter gets to no trial."""
    texts = [*command, space.objective.file]
    used = {match[1] for text in texts for match in _PLACEHOLDER.finditer(text) if match[1]}
    known = (*space.parameters, *OWN)
    for name in sorted(used.difference(known)):
        text = f"the command has {{{name}}}, which is no parameter{near(name, known)}: there are "
        raise LaunchError(f"{text}{', '.join(space.parameters)}; write {{{{{name}}}}} for the text itself")
    for name, one in space.parameters.items():
        if not used & {name, "params"} and not one.env:
            text = f"parameter {name} gets to no trial: write {{{name}}} into the command, or {{params}} for "
            raise LaunchError(text + "a JSON file with all of them, or give it `env: VARIABLE` in the file")


def fill(texts: Sequence[str], parameters: Mapping[str, Any], directory: Path) -> list[str]:
    """Put a trial's parameters, number and directory, whose name is the number, into texts."""
    place = directory.absolute()
    own = {"trial": str(int(place.name)), "dir": str(place), "params": str(place / "params.json")}
    return substitute(texts, {name: as_text(value) for name, value in parameters.items()} | own)


def substitute(texts: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Put `values` into the placeholders of texts."""

    def value(found: re.Match[str]) -> str:
        return values[found[1]] if found[1] else found[0][1:-1]

    return [_PLACEHOLDER.sub(value, text) for text in texts]


def as_text(value: Any) -> str:
    """Return a parameter's value as a command or a variable has it: `true`, `0.01`, a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


# --- values of a trial -----------------------------------------------------------------------------


class Reader:
    """Reads the objective's values in a growing file: the output, JSON lines, or reports."""

    def __init__(self, objective: Objective, path: Path) -> None:
        self._objective, self._path, self._offset = objective, path, 0
        self._key = objective.name if objective.file else "value"
        self.values: list[float] = []

    def new(self, ended: bool = False) -> list[tuple[int, float]]:
        """Return steps and values since the last call; a line without its end only if the trial has."""
        data = b""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        data = data if ended else data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        found = []
        for line in data.decode(errors="replace").splitlines():
            try:
                step, value = self._parse(line)
            except (ValueError, TypeError, KeyError):  # another line, or text in place of a number
                continue
            found.append((len(self.values) if step is None else max(0, int(step)), value))
            self.values.append(value)
        return found

    def _parse(self, line: str) -> tuple[Any, float]:
        if not self._objective.line:
            record = json.loads(line)
            return record.get("step") if isinstance(record, dict) else None, float(record[self._key])
        match = re.search(self._objective.line, line)
        groups = match.groupdict() if match else {}
        return groups.get("step"), float(groups.get("value") or match[1])  # type: ignore[index]

    def result(self) -> float:
        """Return the trial's objective. Raises ValueError if there is none or it is no number."""
        aim, numbers = self._objective, [value for value in self.values if abs(value) < float("inf")]
        if not self.values:
            if not aim.line and not aim.file:
                raise ValueError("the script never called ringdance.report")
            what = f"line that {aim.line!r} matches" if aim.line else f"value of {self._key!r}"
            raise ValueError(f"{self._path} has no {what}")
        if aim.take == "best" and numbers:
            return max(numbers) if aim.goal == "maximize" else min(numbers)
        _require(self.values[-1] in numbers, f"{aim.name} is {self.values[-1]}")
        return self.values[-1]
