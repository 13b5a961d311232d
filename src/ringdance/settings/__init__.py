"""Settings: read once from the environment, then passed on as values.

``load()`` is the only place of the library that reads ``RINGDANCE_*`` and ``HOROVOD_*``
names. ``RINGDANCE_*`` wins over ``HOROVOD_*``; a variable with empty text counts as not set.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ringdance.errors import SettingError
from ringdance.settings.knobs import KNOBS, LEGACY_PREFIX, OWN_PREFIX, Knob, Settings
from ringdance.settings.names import BUILD_NAMES, LAUNCH_PREFIX, LAUNCHER_NAMES, RANK_NAMES

__all__ = [
    "KNOBS", "TOLD", "Knob", "SettingWarning", "Settings", "level_of_caller", "load", "show",
    "without_effect",
]  # fmt: skip

TOLD = "RINGDANCE_JOB_TOLD"
"""Variable in which a launcher names those variables of which it has said that they have no effect."""


class SettingWarning(UserWarning):
    """A setting that is accepted, but will not do what the person who set it may expect."""


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read all knobs from `environ`.

    Warns (:class:`SettingWarning`, on rank 0 only, so that a large job says it once) about names
    that are not known, legacy values that cannot be used and knobs that change nothing here.

    Raises:
        SettingError: a ``RINGDANCE_*`` variable has a value that cannot be used; names the
            variable, the value and what is expected.
    """
    notes: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for knob, variable, text in _given(environ):
        values[knob.name] = _value(knob, variable, text, notes)
        origins[knob.name] = f"environment variable {variable}"
    told = environ.get(TOLD, "").split(",")
    for variable, text, reason in without_effect(environ):
        if variable not in told:
            notes.append(f"{variable}={text} has no effect: {reason}.")
    settings = Settings(**values, origins=origins)
    if 0 < settings.stall_shutdown_time < settings.stall_check_time:
        notes.append(
            f"stall_shutdown_time is ignored: its {settings.stall_shutdown_time:g} s "
            f"({settings.origin('stall_shutdown_time')}) are below stall_check_time's "
            f"{settings.stall_check_time:g} s ({settings.origin('stall_check_time')})."
        )
        del origins["stall_shutdown_time"]
        settings = replace(settings, stall_shutdown_time=0.0, origins=origins)
    notes.extend(_unknown(environ))
    if _is_first(environ):
        level = level_of_caller()
        for note in notes:
            warnings.warn(note, SettingWarning, stacklevel=level)
    return settings


def without_effect(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Variables of `environ` that change a knob to no effect, each with its text and the reason."""
    found = []
    for knob, variable, text in _given(environ):
        if knob.no_effect:
            try:
                changed = _value(knob, variable, text, []) != knob.default
            except SettingError:  # load() tells of it
                continue
            if changed:
                found.append((variable, text, knob.no_effect))
    return found


def _given(environ: Mapping[str, str]) -> Iterator[tuple[Knob, str, str]]:
    """Each knob that is set, the variable that sets it, and its text."""
    for knob in KNOBS:
        for variable in (knob.own, knob.legacy):
            text = environ.get(variable, "").strip()
            if text:
                yield knob, variable, text
                break


def _value(knob: Knob, variable: str, text: str, notes: list[str]) -> Any:
    """The value that `text` stands for; SettingError, or a note and a substitute for a legacy name."""
    legacy = variable == knob.legacy
    try:
        return (knob.parser.legacy if legacy else knob.parser.parse)(text)
    except ValueError:
        if not legacy or knob.strict:
            raise SettingError(
                f"{variable}={text!r} cannot be used: expected {knob.parser.expected}. "
                f"({knob.doc} Default: {show(knob, knob.default)}.)"
            ) from None
    # The original reads such text as 0 in some knobs; where it says nothing, the default is kept.
    value = knob.default if knob.unusable is None else knob.unusable
    expected = "a whole number, 0 for off" if isinstance(value, bool) else knob.parser.expected
    notes.append(f"{variable}={text!r} cannot be used: expected {expected}. {show(knob, value)} holds.")
    return value


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence about each name that looks like a setting and is none, with the nearest known one."""
    knobs = {name for knob in KNOBS for name in (knob.own, knob.legacy) if name}
    known = knobs | LAUNCHER_NAMES | BUILD_NAMES
    for name in sorted(environ):
        prefix = next((p for p in (OWN_PREFIX, LEGACY_PREFIX) if name.startswith(p)), None)
        if prefix is None or name in known or name.startswith(LAUNCH_PREFIX):
            continue
        # Compared without the prefix, which would make everything look alike.
        rest = {k.removeprefix(prefix): k for k in known if k.startswith(prefix)}
        near = difflib.get_close_matches(name.removeprefix(prefix).upper(), rest, n=1, cutoff=0.6)
        hint = f"did you mean {rest[near[0]]}?" if near else "`ringdance settings` lists all names."
        yield f"{name} is not a setting of Ringdance; {hint}"


def level_of_caller() -> int:
    """The `stacklevel` with which a warning of the function that asks names the line of the user's script."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("ringdance", "horovod"):
        level, frame = level + 1, frame.f_back
    return level


def _is_first(environ: Mapping[str, str]) -> bool:
    return all(environ.get(name, "0") == "0" for name in RANK_NAMES)


def show(knob: Knob, value: Any) -> str:
    """`value` as a person would write it, with its unit."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "(empty)"
    if value == "":
        return "(empty)"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {knob.unit}" if knob.unit else text
