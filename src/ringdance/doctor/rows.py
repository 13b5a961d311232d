"""Build the judges of checks from rows: a text with a limit, variables, values to compare."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ringdance.doctor.check import Finding, Host, Hosts
from ringdance.launch.hosts import several as several

MB, GB = 1 << 20, 1 << 30


def size(count: float) -> str:
    """Format bytes with a unit, powers of 1024."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GB), ("MiB", MB), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


class _Formatter(string.Formatter):
    """``{memory[total]!b}`` is a size in bytes, ``{network[own]!l}`` a list of names."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "b":
            return "no limit" if value is None else size(value)
        return several(value) if conversion == "l" else super().convert_field(value, conversion)


def limit(
    text: str,
    wrong: Callable[[Host], Any],
    fix: str,
    *,
    problem: str = "",
    applies: Callable[[Host], Any] = lambda host: True,
) -> Callable[[Host], Finding | None]:
    """Judge one host by a condition.

    Args:
        text: the fact; it and the next two may hold fields such as ``{cpu[load]:.1f}``, ``{slots}``.
        wrong: whether the fact is a problem.
        fix: the line that fixes it.
        problem: in place of `text` if it is one.
        applies: whether the host has such a thing at all.
    """

    def judge(host: Host) -> Finding | None:
        if not applies(host):
            return None
        bad = bool(wrong(host))
        fields = {**host.facts, "slots": host.slots}
        shown = _Formatter().vformat(problem or text if bad else text, (), fields)
        return Finding(shown, _Formatter().vformat(fix, (), fields) if bad else "")

    return judge


def equal(
    values: Callable[[Host], Mapping[str, str]], fix: str, severities: Mapping[str, str] | None = None
) -> Callable[[Hosts], Iterator[Finding]]:
    """Judge whether hosts agree.

    Args:
        values: a host's values as text by what they are of, as in ``{"Python": "3.12"}``.
        fix: the line that removes a difference.
        severities: of some of them, in place of the check's own.
    """

    def judge(hosts: Hosts) -> Iterator[Finding]:
        found = {name: values(host) for name, host in hosts.items()}
        for what in dict.fromkeys(what for own in found.values() for what in own):
            by_host = {name: own.get(what, "(missing)") for name, own in found.items()}
            yield from outliers(by_host, fix, what, (severities or {}).get(what, ""))

    return judge


def outliers(values: Mapping[str, str], fix: str, what: str = "", severity: str = "") -> Iterator[Finding]:
    """Yield one finding if all hosts have the same value, else one for each value but the most common.

    Args:
        values: by host; of equally common ones the first host's counts as the most common.
        fix: the line that removes a difference.
        what: before each value in the text.
        severity: in place of the check's own.
    """
    counts = Counter(values.values())
    common = max(counts, key=lambda value: counts[value])
    before = f"{what} " if what else ""
    if len(counts) == 1:
        yield Finding(f"{before}{common} on all hosts", hosts=tuple(values))
        return
    others = several([host for host, value in values.items() if value == common], 3)
    for value in counts:
        if value != common:
            odd = tuple(host for host, own in values.items() if own == value)
            text = f"{before}{value} on {', '.join(odd)}, but {common} on {others}"
            yield Finding(text, fix, severity, odd)
