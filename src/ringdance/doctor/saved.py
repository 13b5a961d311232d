"""Save facts while all is well, and compare them later."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdance.doctor.check import Facts, Result
from ringdance.errors import LaunchError

FORMAT = 2
# Different each time, without a meaning.
_VOLATILE = frozenset(
    {
        "times", "reach", "links", "load", "available", "free", "inodes_free", "swap_used",
        "threads", "orphans", "shared", "probe_files", "used", "processes", "identity", "world",
        "throttled",
    }
)  # fmt: skip


def save(path: str, facts: Mapping[str, Facts], results: Sequence[Result]) -> None:
    """Write facts and problems to a file that only this user can read.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, "facts": facts, "wrong": sorted(_wrong(results))}, indent=1)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # an older file keeps its mode
        file.write(text)


def load(path: str) -> dict[str, Any]:
    """Read what `save` wrote.

    Raises:
        LaunchError: it is something else.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
    except ValueError:
        found = {}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LaunchError(f"--diff {path}: not written by this version's `ringdance doctor --save`")
    return found


def changes(old: Mapping[str, Any], facts: Mapping[str, Facts], results: Sequence[Result]) -> list[str]:
    """Return a line for each change: hosts, facts, and problems that are new or gone."""
    lines = [f"{host}: in the file only" for host in old["facts"] if host not in facts]
    for host, found in facts.items():
        known = old["facts"].get(host)
        if known is None:
            lines.append(f"{host}: new")
            continue
        # A probe that ran only once is not compared.
        both = [probe for probe in found if probe in known]
        before = dict(_flat({probe: known[probe] for probe in both}))
        after = dict(_flat(json.loads(json.dumps({probe: found[probe] for probe in both}))))
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                lines.append(f"{host}: {name}: {_shown(before.get(name))} -> {_shown(after.get(name))}")
    wrong, checked = _wrong(results), {result.check for result in results}
    lines += [f"new: {text}" for text in sorted(wrong - set(old["wrong"]))]
    gone = sorted(text for text in set(old["wrong"]) - wrong if text.partition(":")[0] in checked)
    return lines + [f"no longer: {text}" for text in gone]


def _wrong(results: Sequence[Result]) -> set[str]:
    return {f"{result.check}: {result.text}" for result in results if result.wrong}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested facts with their paths, without volatile ones."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _VOLATILE:
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
