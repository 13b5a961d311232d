"""Print the checks of ``ringdance doctor`` and their results as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringdance.launch.hosts import counted
from ringdance.tools.doctor.check import AREAS, ERROR, NOTE, SEVERITIES, WARNING, Result
from ringdance.tools.doctor.examine import CHECKS

_STYLES = {ERROR: "bold red", WARNING: "bold yellow", NOTE: "cyan", "unknown": "dim", "ok": "green"}
_WIDTH = 100
_INDENT = " " * 10


def _console() -> Console:
    return Console(width=_WIDTH, highlight=False)


def print_checks() -> None:
    """Print a table of all checks."""
    fields = ("name", "area", "severity", "description")
    table = Table(*fields, box=None, pad_edge=False)
    for check in CHECKS.values():
        table.add_row(*(getattr(check, field) for field in fields))
    _console().print(table)
    print(f"\n{len(CHECKS)} checks")


def print_text(hosts: Sequence[str], results: Sequence[Result], verbose: bool = False) -> None:
    """Print the problems by area, each with its fix. If ``verbose``, also print the checks that passed."""
    console = _console()
    for area in AREAS:
        shown = [result for result in results if result.area == area and (result.wrong or verbose)]
        if shown:
            console.print(area, style="bold")
        for result in sorted(shown, key=lambda result: list(_STYLES).index(result.severity)):
            # Name the hosts unless the result applies to all hosts.
            some = len(hosts) > 1 and len(result.hosts) < len(hosts)
            where = f" [{', '.join(result.hosts)}]" if some else ""
            head = f"  {result.severity:<8}{result.check}{where}: "
            lines = textwrap.wrap(
                head + result.text, _WIDTH, subsequent_indent=_INDENT, break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
            # Do not wrap fixes, because users copy and paste them.
            text = Text("\n".join([*lines, f"{_INDENT}fix: {result.fix}"] if result.fix else lines))
            text.stylize(_STYLES[result.severity], 2, 2 + len(result.severity))
            console.print(text, soft_wrap=True)
        if shown:
            print()
    counts = {severity: sum(result.severity == severity for result in results) for severity in _STYLES}
    words = [counted(counts[name], name) for name in SEVERITIES if counts[name]]
    words += [f"{counts['unknown']} could not be checked"] if counts["unknown"] else []
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    print(f"{where}: {', '.join(words) or 'no problems'}; {counts['ok']} checks passed")
