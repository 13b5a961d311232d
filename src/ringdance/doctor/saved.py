"""What has changed since a good day: facts are saved, and compared later."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdance.doctor.registry import Facts, Result
from ringdance.errors import LaunchError

FORMAT = 1
# What is different at each look, and says nothing.
_VOLATILE = frozenset(
    {
        "times", "reach", "links", "load", "steal", "available", "free", "inodes_free", "swap_used",
        "threads",         "zombies", "orphans", "shared", "folders", "marks", "memory.used", "processes",
        "huge_pages_free",         "identity", "port_taken", "job", "world",
    }
)  # fmt: skip
_KEPT = {"disk": ("folders",)}


def save(path: str, facts: Mapping[str, Facts], results: Sequence[Result]) -> None:
    """Write facts and what is wrong to a file that only this user can read.

    Raises:
        LaunchError: it cannot be written.
    """
    wrong = sorted({f"{r.check}: {r.text}" for r in results if r.wrong})
    text = json.dumps({"format": FORMAT, "facts": facts, "wrong": wrong}, indent=1)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # an older file keeps its mode
            file.write(text)
    except OSError as error:
        raise LaunchError(f"--save {path}: {error.strerror}") from None


def load(path: str) -> dict[str, Any]:
    """What `save` wrote.

    Raises:
        LaunchError: it cannot be read, or is something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
    except OSError as error:
        raise LaunchError(f"--diff {path}: {error.strerror}") from None
    except ValueError:
        raise LaunchError(f"--diff {path}: it was not written by `ringdance doctor --save`") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LaunchError(f"--diff {path}: it was not written by this version's `ringdance doctor --save`")
    return found


def changes(old: Mapping[str, Any], facts: Mapping[str, Facts], results: Sequence[Result]) -> list[str]:
    """A line for each thing that has changed: hosts, facts, and what is wrong or no longer wrong."""
    lines = []
    for host in old["facts"]:
        if host not in facts:
            lines.append(f"{host}: was there, is not asked now")
    for host, found in facts.items():
        if host not in old["facts"]:
            lines.append(f"{host}: is new")
            continue
        # Probes that ran on one of the two days only say nothing.
        both = [probe for probe in found if probe in old["facts"][host]]
        before = dict(_flat({probe: old["facts"][host][probe] for probe in both}))
        after = dict(_flat(json.loads(json.dumps({probe: found[probe] for probe in both}))))
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                lines.append(f"{host}: {name}: {_shown(before.get(name))} -> {_shown(after.get(name))}")
    wrong = {f"{r.check}: {r.text}" for r in results if r.wrong}
    checked = {r.check for r in results}
    lines += [f"new: {text}" for text in sorted(wrong - set(old["wrong"]))]
    gone = sorted(text for text in set(old["wrong"]) - wrong if text.partition(":")[0] in checked)
    return lines + [f"no longer: {text}" for text in gone]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested facts, by the way to them; volatile ones are left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            kept = key in _KEPT.get(name, ())
            if key not in _VOLATILE or kept:
                yield from _flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for item in value:
            label = item.get("name") or item.get("index") or item.get("path") or value.index(item)
            yield from _flat(item, f"{name}[{label}]")
    else:
        yield name, value


def _shown(value: Any) -> str:
    if value is None:
        return "(none)"
    return ", ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value) or "(empty)"
