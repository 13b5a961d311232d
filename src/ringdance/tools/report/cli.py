"""``ringdance report``: write an HTML page that shows what limits a run and what to try next."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser, as_program
from ringdance.tools.report.bottlenecks import Limit, judge
from ringdance.tools.report.metrics import RunMetrics, read_run
from ringdance.tools.report.page import page, speed_of
from ringdance.tools.report.summary import RankTimes, notes, ranks_of
from ringdance.tools.report.trace import load

_EPILOG = """\
examples:
  ringdance run -np 4 --output-filename logs python train.py           write the run's metrics to logs
  ringdance report logs -o report.html                                 print what limits it and write the page
  ringdance run -np 4 --output-filename logs --timeline logs/timeline.json python train.py
  ringdance report logs                                                with a section about the timeline
  ringdance report one two four --batch-size 32 -o scaling.html        speed by number of ranks
  ringdance report logs --json                                         print the result as JSON

Short runs need more frequent samples: RINGDANCE_METRICS_INTERVAL=1. The page is one self-contained file.
"""
_TIMELINES = ("timeline.json", "*timeline*.json")


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance report`` with the arguments ``argv``. Returns the exit code."""
    parser = Parser(
        prog="ringdance report",
        description="Write a page that shows whether input, computation, communication or skew limits a run.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    text = "directory of `ringdance run --output-filename`; the page compares all and describes the last one"
    add("directories", metavar="RUN_DIR", nargs="+", type=Path, help=text)
    add("-o", "--output", type=Path, metavar="FILE", help="file (default: report.html in the last RUN_DIR)")
    add("--timeline", type=Path, metavar="FILE", help="timeline of the last run (default: one in RUN_DIR)")
    add("--batch-size", type=int, default=0, metavar="N", help="samples per rank and step, to show samples/s")
    add("--json", action="store_true", help="print the result as JSON")

    def action() -> int:
        arguments = parser.parse_args(list(argv))
        runs = [read_run(directory) for directory in arguments.directories]
        trace = trace_of(runs[-1], arguments.timeline)
        limit = judge(runs[-1], uneven_share(trace))
        limit.evidence.extend(notes(trace))
        target = arguments.output or runs[-1].directory / "report.html"
        target.write_text(page(runs, limit, trace, arguments.batch_size), encoding="utf-8")
        if arguments.json:
            print(json.dumps({**asdict(limit), "page": str(target)}, indent=1))
        else:
            print(f"{_words(limit)}\n{speed_of(runs[-1], arguments.batch_size)}\nReport written to {target}")
        return 0

    return as_program("ringdance report", action)


def trace_of(run: RunMetrics, file: Path | None) -> list[RankTimes]:
    """Return a run's timeline from ``file`` or, if None, the run's directory. Returns [] if it has none.

    Raises:
        LaunchError: ``file`` contains the timeline of another run.
    """
    processes = {(rank.rank, rank.host, rank.rows[0]["pid"]) for rank in run.ranks}
    for path in [file] if file else [path for name in _TIMELINES for path in run.directory.glob(name)]:
        ranks = ranks_of(load(path))
        if own := [rank for rank in ranks if (rank.rank, rank.host, rank.pid) in processes]:
            return [rank for rank in own if rank.steps.sum() > 0]
        if file and ranks:
            raise LaunchError(f"{file} is the timeline of another run: it has no rank of {run.directory}")
    return []


def uneven_share(trace: Sequence[RankTimes]) -> float:
    """Return the share of the time that every rank spends waiting for other ranks to submit requests."""
    return min((float(rank.parts["negotiate"].sum() / rank.steps.sum()) for rank in trace), default=0.0)


def _words(limit: Limit) -> str:
    lines = [f"Bound by {limit.bound}. {limit.sentence}"]
    for text in limit.evidence:
        lines.append(textwrap.fill(text, 100, initial_indent="  - ", subsequent_indent="    "))
    lines.append(textwrap.fill(f"Try next: {limit.next_step}", 100))
    return "\n".join(lines)
