"""``ringdance timeline``: show how each rank spends the time in a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringdance.launch.parser import Parser, as_program, at_least
from ringdance.tools.report.summary import PARTS, summarize
from ringdance.tools.report.trace import load

_EPILOG = """\
examples:
  ringdance run -np 4 --timeline t.json python train.py      write a timeline
  ringdance timeline t.json                                  show where the time of a step goes
  ringdance timeline t.json --steps 50                       show a row for each of the last 50 steps
  ringdance timeline t.json --json | jq '.ranks[0]'          print the slowest rank's times, in seconds

The file may be incomplete, for example if the job was killed. Steps are marked by
optimizers or hvd.mark_step(). Without marks, the summary covers the whole file.

between: time between exchanges, in which the rank computes, loads data or sleeps. exposed: time in which
training waits for results. Its parts are negotiate, until all ranks have submitted; data, until the data from
the other ranks has arrived; copying; reducing; and other, the rest of an exchange. hidden: time in which
batches are exchanged while the rank computes.
"""

_COLUMNS = {key: key.replace("_", " ").removeprefix("wait for ") for key in (
    "step", "compute", "exposed", *PARTS, "hidden",
)} | {"compute": "between"}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance timeline`` with the arguments ``argv``. Returns the exit code."""
    parser = Parser(
        prog="ringdance timeline",
        description="Show where the time of a step goes, which ranks are slow, and which tensors are late.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="file of `ringdance run --timeline FILE`")
    count = at_least(int, 0)
    add("--steps", type=count, default=10, metavar="N", help="number of last steps to show (default: 10)")
    add("--tensors", type=count, default=10, metavar="N", help="number of tensors to show (default: 10)")
    add("--json", action="store_true", help="print everything as JSON, with times in seconds")

    def action() -> int:
        arguments = parser.parse_args(list(argv))
        summary = summarize(load(arguments.file))
        if arguments.json:
            print(json.dumps(summary, indent=1))
        else:
            _show(Console(), summary, arguments.steps, arguments.tensors)
        return 0

    return as_program("ringdance timeline", action)


def milliseconds(seconds: float) -> str:
    """Format a time in seconds as milliseconds with up to three significant digits."""
    value = seconds * 1000
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def rank_table(ranks: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table that breaks down each rank's time per step, in milliseconds."""
    rows = [
        [f"{row['rank']} {row['host']}", *(milliseconds(row[f"{key}_seconds"]) for key in _COLUMNS)]
        for row in ranks
    ]
    return ["rank", *_COLUMNS.values()], rows


def _show(console: Console, summary: dict[str, Any], steps: int, tensors: int) -> None:
    ranks, mean = summary["ranks"], summary["mean"]
    if summary["sentence"]:
        console.print(Text(summary["sentence"], "bold"), soft_wrap=True)
    if ranks:
        what = "Per step" if summary["steps_marked"] else "For the whole file (no steps are marked)"
        columns, rows = rank_table([*ranks, {"rank": "mean", "host": "", **mean}])
        total = mean["step_seconds"] or 1.0
        rows.append(["", *(f"{mean[f'{key}_seconds'] / total:.0%}" for key in _COLUMNS)])
        _table(console, f"{what}, ms; slowest rank first", columns, rows)
    if summary["steps"] and steps > 0:
        _table(
            console, f"Steps, ms; last {min(steps, len(summary['steps']))} of {len(summary['steps'])}",
            ["step", "time", "exposed", "slowest rank", "behind the others"],
            [
                [str(row["step"]), milliseconds(row["seconds"]), milliseconds(row["exposed_seconds"]),
                 str(row["slowest_rank"]), milliseconds(row["slowest_seconds"])]
                for row in summary["steps"][-steps:]
            ],
        )  # fmt: skip
    if summary["tensors"] and tensors > 0:
        _table(
            console, "Late tensors, ms; longest total wait first",
            ["tensor", "count", "negotiation", "total wait", "late rank", "last"],
            [
                [row["tensor"], str(row["times"]), milliseconds(row["negotiate_seconds"]),
                 milliseconds(row["late_seconds"]), str(row["late_rank"]), f"{row['late_share']:.0%}"]
                for row in summary["tensors"][:tensors]
            ],
        )  # fmt: skip
    for text in summary["notes"]:
        console.print(Text(text), soft_wrap=True)
    for row in summary["unfinished"]:
        by, missing = (", ".join(map(str, row[key])) or "none" for key in ("submitted_by", "missing"))
        text = f"Pending at the end of the file: {row['tensor']}, submitted by ranks {by}; missing: {missing}"
        console.print(Text(text), soft_wrap=True)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
    for number, column in enumerate(columns):
        width = max(map(len, column.split()))
        table.add_column(column, justify="right" if number else "left", overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
