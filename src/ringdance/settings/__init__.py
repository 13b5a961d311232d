"""Settings, which are read from the environment once and then passed around as values.

``load()`` is the only function in the library that reads ``RINGDANCE_*`` and ``HOROVOD_*``
variables. ``RINGDANCE_*`` takes precedence over ``HOROVOD_*``. An empty variable counts as not set.
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
from ringdance.settings.fields import SETTINGS, Setting, Settings
from ringdance.settings.names import (
    BUILD_NAMES,
    LAUNCH_PREFIX,
    LAUNCHER_NAMES,
    NO_EFFECT,
    RANK_NAMES,
    SEARCH_PREFIX,
)  # fmt: skip
from ringdance.settings.parse import SWITCH_WORDS

__all__ = [
    "NO_EFFECT", "SETTINGS", "WARNED", "Setting", "SettingWarning", "Settings", "level_of_caller", "load",
    "show", "without_effect",
]  # fmt: skip

WARNED = "RINGDANCE_JOB_WARNED"
"""Variable in which a launcher lists the variables that it has already reported as having no effect."""
_PREFIXES = ("RINGDANCE_", "HOROVOD_")


class SettingWarning(UserWarning):
    """Warning about a setting that is accepted but may not have the expected effect."""


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings from ``environ``.

    Warns (``SettingWarning``, on rank 0 only) about unknown names, invalid ``HOROVOD_*`` values and
    settings that have no effect.

    Raises:
        SettingError: The value of a ``RINGDANCE_*`` variable is invalid. The message gives the variable, the
            value and the expected form.
    """
    notes: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        variable, text = _first(environ, setting.own, setting.legacy)
        if text:
            values[setting.name] = _value(setting, variable, text, notes)
            origins[setting.name] = f"environment variable {variable}"
    warned = environ.get(WARNED, "").split(",")
    for variable, text, reason in without_effect(environ):
        if variable not in warned:
            notes.append(f"{variable}={text} has no effect: {reason}.")
    settings = Settings(**values, origins=origins)
    if 0 < settings.stall_shutdown_time < settings.stall_check_time:
        notes.append(
            f"stall_shutdown_time={settings.stall_shutdown_time:g} s "
            f"({settings.origin('stall_shutdown_time')}) is ignored, because it is shorter than "
            f"stall_check_time={settings.stall_check_time:g} s ({settings.origin('stall_check_time')})."
        )
        del origins["stall_shutdown_time"]
        settings = replace(settings, stall_shutdown_time=0.0, origins=origins)
    notes.extend(_unknown(environ))
    if all(environ.get(name, "0") == "0" for name in RANK_NAMES):
        for note in notes:
            warnings.warn(note, SettingWarning, stacklevel=level_of_caller())
    return settings


def without_effect(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, value, reason) for each variable in ``environ`` that has an effect only in Horovod."""
    ignored = []
    for name, (default, reason) in NO_EFFECT.items():
        variable, text = _first(environ, *(prefix + name for prefix in _PREFIXES))
        lower = text.lower()
        if text and SWITCH_WORDS.get(lower, lower) != SWITCH_WORDS.get(default, default.lower()):
            ignored.append((variable, text, reason))
    return ignored


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Return the name and value of the first variable in ``names`` that is set, or ("", "") if none is."""
    return next(((name, text) for name in names if (text := environ.get(name, "").strip())), ("", ""))


def _value(setting: Setting, variable: str, text: str, notes: list[str]) -> Any:
    """Parse ``text``. For an invalid ``HOROVOD_*`` value, add a note and return the value to use instead.

    Raises:
        SettingError: The value of a ``RINGDANCE_*`` variable cannot be parsed.
    """
    legacy = variable == setting.legacy
    try:
        return setting.parser.parse(text, legacy)
    except ValueError:
        if not legacy:
            raise SettingError(
                f"{variable}={text!r} cannot be used: expected {setting.parser.expected}. "
                f"({setting.doc} Default: {show(setting, setting.default)}.)"
            ) from None
    # Horovod reads invalid values of some settings as 0. Do the same for switches only, because setting a
    # number to 0 could change more than the user intended.
    value = False if isinstance(setting.default, bool) else setting.default
    expected = "an integer (0 means off)" if isinstance(value, bool) else setting.parser.expected
    notes.append(f"{variable}={text!r} cannot be used: expected {expected}. Using {show(setting, value)}.")
    return value


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each unknown ``RINGDANCE_*`` or ``HOROVOD_*`` variable, with the closest name."""
    known = {name for setting in SETTINGS for name in (setting.own, setting.legacy) if name}
    known |= LAUNCHER_NAMES | BUILD_NAMES | {prefix + name for prefix in _PREFIXES for name in NO_EFFECT}
    for name in sorted(environ):
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is None or name in known or name.startswith((LAUNCH_PREFIX, SEARCH_PREFIX)):
            continue
        # Compare the names without their common prefix, which would make all of them look similar.
        rest = {k.removeprefix(prefix): k for k in known if k.startswith(prefix)}
        near = difflib.get_close_matches(name.removeprefix(prefix).upper(), rest, n=1, cutoff=0.6)
        hint = f"did you mean {rest[near[0]]}?" if near else "`ringdance settings` lists all names."
        yield f"{name} is not a Ringdance setting; {hint}"


def level_of_caller() -> int:
    """Return the ``stacklevel`` that attributes the caller's warnings to a line in the user's script."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("ringdance", "horovod"):
        level, frame = level + 1, frame.f_back
    return level


def show(setting: Setting, value: Any) -> str:
    """Format ``value`` with its unit."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "(empty)"
    if value == "":
        return "(empty)"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {setting.unit}" if setting.unit else text
