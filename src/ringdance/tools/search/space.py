"""Search files, which define the parameters, the objective, and how to search the space."""

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
"""Built-in placeholders: a trial's number, its directory, a JSON file with all parameters, and its slots."""
_NAME = r"[A-Za-z_]\w*"
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_COUNT = r"[1-9]\d*", "a whole number, 1 or more"
# Valid values in the search file, by key: a pattern that matches their repr, and a description.
_FORMS = {
    "trials": _COUNT, "failures": _COUNT, "goal": ("'(maximize|minimize)'", "maximize or minimize"),
    "take": ("'(last|best)'", "last or best"),
}  # fmt: skip


class Parameter(NamedTuple):
    """A parameter that the search varies.

    Attributes:
        kind: "float", "int" or "categorical": the suffix of the Optuna method ``suggest_*`` to call.
        options: Arguments of this method: low, high, step and log, or choices.
    """

    kind: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Objective:
    """The value to maximize or minimize, and how to obtain it from a trial.

    Attributes:
        name: Name shown in messages and tables.
        goal: "maximize" or "minimize".
        line: Regular expression for output lines. The group ``value``, or else the first group, matches the
            value. An optional group ``step`` matches the step. If "", trials call ``ringdance.report``.
        take: "last" or "best": which of its values is the result of a trial.
    """

    name: str = "objective"
    goal: str = "minimize"
    line: str = ""
    take: str = "last"


@dataclass(frozen=True)
class Space:
    """The contents of a search file.

    Attributes:
        parameters: Parameters by name.
        objective: The value to optimize.
        trials: Number of trials to run, including failed ones.
        failures: Number of failed trials after which the search stops.
        sampler, pruner: Names and options of the Optuna sampler and pruner.
    """

    parameters: Mapping[str, Parameter]
    objective: Objective
    trials: int = 20
    failures: int = 5
    sampler: Mapping[str, Any] = field(default_factory=lambda: {"name": "tpe"})
    pruner: Mapping[str, Any] = field(default_factory=lambda: {"name": "nop"})

    def definition(self) -> dict[str, Any]:
        """Return the part that must be the same for all trials in a study, in the format of a search file."""
        aim = {key: value for key, value in asdict(self.objective).items() if value}
        return {"parameters": {name: p.options for name, p in self.parameters.items()}, "objective": aim}


def read_space(path: Path) -> Space:
    """Read a search file. Raises LaunchError if the file is invalid."""
    try:
        return parse_space(read_yaml(read_regular(path)))
    except ValueError as error:
        raise LaunchError(f"{path}: {error}") from None


def parse_space(found: Any) -> Space:
    """Build a space from the parsed contents of a search file. Raises ValueError if they are invalid."""
    options = _checked("the file", found, [item.name for item in fields(Space)])
    parameters = _checked("parameters", options.pop("parameters", {}))
    if not parameters:
        raise ValueError("the space is empty. Write for example: parameters: {lr: {low: 0.01, high: 1.0}}")
    aim = _checked("objective", options.pop("objective", {}), [item.name for item in fields(Objective)])
    if "line" in aim and not value_group(str(aim["line"])):
        wanted = "a regular expression with a group for the number, such as 'loss (\\S+)'"
        raise ValueError(f"objective: line must be {wanted}. Received: {aim['line']!r}")
    for key in options.keys() & {"sampler", "pruner"}:
        value = options[key]
        options[key] = {"name": "", **_checked(key, {"name": value} if isinstance(value, str) else value)}
    objective = Objective(**{key: str(value) for key, value in aim.items()})
    return Space({name: _parameter(name, value) for name, value in parameters.items()}, objective, **options)


def _checked(name: str, found: Any, known: Sequence[str] = ()) -> dict[str, Any]:
    """Return a copy of the mapping ``found``. If ``known`` is given, also check its keys and values."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must be a mapping, with lines `key: value`. Received: {found!r}")
    for key, value in found.items() if known else ():
        if key not in known:
            raise ValueError(f"{name}: unknown key {key!r}. Known: {', '.join(known)}")
        form, words = _FORMS.get(key, (".*", ""))
        if not re.fullmatch(form, repr(value), re.ASCII | re.DOTALL):
            raise ValueError(f"{name}: {key} must be {words}. Received: {value!r}")
    return dict(found)


def _parameter(name: Any, found: Any) -> Parameter:
    distributions = optional("optuna", LaunchError, "`ringdance search` needs Optuna").distributions
    if not re.fullmatch(_NAME, str(name), re.ASCII) or name in OWN:
        raise ValueError(f"{name!r} is not a valid name. Use letters, digits and _, but not {', '.join(OWN)}")
    found = {"choices": found} if isinstance(found, list) else found
    choices = isinstance(found, Mapping) and "choices" in found
    options = _checked(name, found, ["choices"] if choices else ["low", "high", "step", "log"])
    try:
        numbers: list[Any] = [options.get(key) for key in ("low", "high", *options.keys() & {"step"})]
        if not choices and not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ValueError("low, high and step must be finite numbers")
        if choices and not isinstance(options["choices"], list):
            raise ValueError("choices must be a list")
        kind = "categorical" if choices else "float" if float in map(type, numbers) else "int"
        # If choices are equal, such as 1 and 1.0, Optuna always records the first of them.
        same = [choice for choice in options.get("choices", ()) if options["choices"].count(choice) > 1]
        if same:
            raise ValueError(f"Optuna considers {' and '.join(map(as_text, same))} equal")
        getattr(distributions, f"{kind.capitalize()}Distribution")(**options)
    except (ValueError, TypeError) as error:
        ways = "{low: 0.01, high: 1, log: true}, with step: instead of log:, or [a, list, of values]"
        raise ValueError(f"{name}: {error}. Write {ways}") from None
    return Parameter(kind, options)


# --- commands --------------------------------------------------------------------------------------


def check_command(space: Space, command: Sequence[str]) -> None:
    """Raise LaunchError if the command does not pass all parameters to the trials."""
    used = set(_PLACEHOLDER.findall(" ".join(command)))
    if lost := [name for name in space.parameters if not used & {name, "params"}]:
        text = f"no trial receives parameter {', '.join(lost)}. Write {{{lost[0]}}} into the command, as in "
        raise LaunchError(text + "`env LR={lr} python train.py`, or {params} for a JSON file with all values")


def fill(texts: Sequence[str], values: Mapping[str, Any], directory: Path, slots: str) -> list[str]:
    """Replace placeholders in texts with a trial's parameters, number, directory and slots.

    The trial's number is the name of its directory. Unknown names in braces are left unchanged.
    """
    own = {"trial": str(int(directory.name)), "dir": str(directory), "slots": slots}
    own["params"] = str(directory / "params.json")
    known = {name: as_text(value) for name, value in values.items()} | own
    return [_PLACEHOLDER.sub(lambda match: known.get(match[1], match[0]), text) for text in texts]


def as_text(value: Any) -> str:
    """Format a parameter's value for a command or environment variable, as JSON except for plain text."""
    return value if isinstance(value, str) else json.dumps(value)


# --- values of a trial -----------------------------------------------------------------------------


def value_group(line: str) -> int:
    """Return the index of the group in the pattern ``line`` that matches the value, or 0 if there is none.

    This is the group ``value``, or else the first group other than ``step``.
    """
    try:
        pattern = re.compile(line)
    except re.error:
        return 0
    others = set(range(1, pattern.groups + 1)) - {pattern.groupindex.get("step")}
    return pattern.groupindex.get("value") or min(others, default=0)


class Reader:
    """Reads objective values from a growing file with a trial's output or reports."""

    def __init__(self, objective: Objective, path: Path) -> None:
        self._objective, self._path, self._offset = objective, path, 0
        self.values: list[float] = []

    def new(self, ended: bool = False) -> list[tuple[int, float]]:
        """Return the steps and values that were added to the file since the last call.

        An incomplete last line is included only if the trial has ``ended``.
        """
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data if ended else data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        reports = []
        for line in data.decode(errors="replace").splitlines():
            # Skip lines that do not match, and values that are not numbers.
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError):
                step, value = self._parse(line)
                reports.append((len(self.values) if step is None else max(0, int(step)), float(value)))
                self.values.append(reports[-1][1])
        return reports

    def _parse(self, line: str) -> tuple[Any, Any]:
        aim = self._objective
        if aim.line:
            match: Any = re.search(aim.line, line)
            return match.groupdict().get("step"), match[value_group(aim.line)]
        record = json.loads(line)
        return record.get("step"), record["value"]

    def result(self) -> tuple[float, str]:
        """Return the trial's result, and the reason if the result is not finite ("" if it is)."""
        aim, numbers = self._objective, list(filter(math.isfinite, self.values))
        if not self.values:
            return math.nan, f"no value of {aim.name} was found by {aim.line or 'ringdance.report'}"
        if aim.take == "best" and numbers:
            return max(numbers) if aim.goal == "maximize" else min(numbers), ""
        last = self.values[-1]
        return last, "" if math.isfinite(last) else f"{aim.name} is {last}"
