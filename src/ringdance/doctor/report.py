"""What the doctor found, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.doctor.registry import AREAS, ERROR, NOTE, SEVERITIES, WARNING, Facts, Result, all_checks

_COLOURS = {ERROR: "31;1", WARNING: "33;1", NOTE: "36", "ok": "32", "unknown": "2"}
_WIDTH = 100


def listing(style: str) -> str:
    """All checks by area, with what they look at."""
    checks = all_checks().values()
    if style == "json":
        rows = [
            {"name": c.name, "area": c.area, "severity": c.severity, "looks_at": c.looks_at} for c in checks
        ]
        return json.dumps(rows, indent=2)
    lines = []
    for area in AREAS:
        lines += [f"{area}"]
        for check in checks:
            if check.area == area:
                head = f"  {check.name:<28} {check.severity:<8} "
                lines += textwrap.wrap(
                    check.looks_at, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
                )
    return "\n".join([*lines, "", f"{len(checks)} checks"])


def as_json(
    facts: Mapping[str, Facts], results: Sequence[Result], changed: Sequence[str] | None = None
) -> str:
    """Findings and facts; what has changed, if something was compared."""
    found: dict[str, Any] = {"results": [dataclasses.asdict(result) for result in results], "facts": facts}
    if changed is not None:
        found["changed"] = list(changed)
    return json.dumps(found, indent=2)


def as_text(hosts: Sequence[str], results: Sequence[Result], verbose: bool = False) -> str:
    """By area: what is wrong with the line that mends it; with `verbose` also what is in order."""
    lines: list[str] = []
    for area in AREAS:
        found = [result for result in results if result.area == area]
        shown = [result for result in found if result.wrong or verbose]
        shown.sort(key=lambda result: (*SEVERITIES, "unknown", "ok").index(result.severity))
        if shown:
            lines += ["", _coloured(area, "1")]
            for result in shown:
                lines += _lines(result, hosts)
    if lines:
        lines = [*lines[1:], ""]
    return "\n".join([*lines, _summary(hosts, results)])


def _lines(result: Result, hosts: Sequence[str]) -> list[str]:
    """A result as lines; the hosts are named if there are several and it is not about all."""
    where = f" [{', '.join(result.hosts)}]" if len(hosts) > 1 and len(result.hosts) < len(hosts) else ""
    head = f"  {result.severity:<8}{result.check}{where}: "
    body = textwrap.wrap(
        head + result.text, _WIDTH, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False
    )
    body[0] = body[0].replace(result.severity, _coloured(result.severity, _COLOURS[result.severity]), 1)
    # Never broken: it is there to be copied.
    return [*body, f"          mend: {result.mend}"] if result.mend else body


def _summary(hosts: Sequence[str], results: Sequence[Result]) -> str:
    counts = {severity: sum(result.severity == severity for result in results) for severity in SEVERITIES}
    good = sum(result.severity == "ok" for result in results)
    words = [f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items() if count]
    unknown = sum(result.severity == "unknown" for result in results)
    words += [f"{unknown} could not be looked at"] if unknown else []
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{where}: {', '.join(words) or 'nothing is wrong'}; {good} in order"


def _coloured(text: str, code: str) -> str:
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        return f"\033[{code}m{text}\033[0m"
    return text
