"""Create the page for ``ringdance report``, a self-contained HTML file."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape
from statistics import fmean

from ringdance.core.reports.judging import WORTH
from ringdance.tools.report import svg
from ringdance.tools.report.bottlenecks import Limit
from ringdance.tools.report.metrics import Rank, RunMetrics
from ringdance.tools.report.summary import RankTimes, rank_row
from ringdance.tools.report.timeline import milliseconds, rank_table

_STEP = ("between exchanges", "waits for slower ranks", "exchanges")
_LINES = 4  # maximum number of lines per plot


def page(runs: Sequence[RunMetrics], limit: Limit, trace: Sequence[RankTimes], batch: int) -> str:
    """Return the page as HTML.

    Args:
        runs: Runs to compare. The page describes the last one.
        limit: What limits the last run.
        trace: Timelines of the ranks in the last run. May be empty.
        batch: Samples per rank and step, or 0 if unknown.
    """
    run = runs[-1]
    speed = speed_of(run, batch)
    evidence = "".join(f"<li>{_code(text)}</li>" for text in limit.evidence)
    parts = [
        f"<h1>{escape(run.directory.resolve().name)}: bound by {limit.bound}</h1>",
        f"<p>{run.size} rank{'s' * (run.size != 1)} on {len(run.hosts)} host{'s' * (len(run.hosts) != 1)}, "
        f"{run.seconds:.0f} s, {run.ranks[0].rows[-1]['steps']} steps, {_code(speed)}</p>",
        f'<section class="verdict"><p><strong>{escape(limit.sentence)}</strong></p><ul>{evidence}</ul>'
        f"<p><b>Try next:</b> {_code(limit.next_step)}</p></section>",
        f'<h2>The run</h2><div class="plots">{"".join(_plots(run, batch))}</div>',
        "<h2>Ranks</h2>" + _ranks_table(run),
    ]  # fmt: skip
    if trace:
        times = _table(*rank_table([rank_row(rank) for rank in trace]))
        parts.append(f"<h2>Timeline</h2><p>Time per step, ms:</p>{times}")
    if len(runs) > 1:
        parts.append(f"<h2>Scaling</h2>{_scaling(runs, batch)}")
    written = time.strftime("%Y-%m-%d %H:%M")
    parts.append(f"<footer>Written by ringdance report {written}, for {escape(str(run.directory))}.</footer>")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.directory.resolve().name)}: bound by {limit.bound}</title>"
        f'<link rel="icon" href="data:,"><style>{svg.STYLE.read_text()}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def speed_of(run: RunMetrics, batch: int) -> str:
    """Describe a run's speed. If ``batch`` is 0, explain how to get the speed in samples per second."""
    samples = f"{run.steps_per_second * run.size * batch:,.4g} samples/s of all ranks"
    hint = "for samples/s, pass `--batch-size N` (samples per rank and step)"
    return f"{run.steps_per_second:.4g} steps/s; {samples if batch else hint}"


def _code(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], slow: int = -1) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    marks = ["<tr class='slow'>" if number == slow else "<tr>" for number in range(len(rows))]
    body = "".join(
        f"{mark}{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for mark, row in zip(marks, rows, strict=True)
    )
    tables = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table" tabindex="0">{tables}</div>'


def _plots(run: RunMetrics, batch: int) -> list[str]:
    start = min(rank.rows[0]["time"] for rank in run.ranks)

    def gauge(rank: Rank, key: str) -> svg.Line:
        return [(row["time"] - start, row[key]) for row in rank.rows if key in row]

    plots = []
    unit, samples = ("samples/s", batch * run.size) if batch else ("steps/s", 1)
    if rates := [(at - start, rate * samples) for at, rate in run.ranks[0].rates()]:
        plots.append(svg.lines("Throughput", {unit: rates}, "s", unit))
    rows = {}
    for rank in sorted(run.ranks, key=lambda rank: rank.exposed)[:32]:
        step, exposed = rank.step_seconds * 1000, rank.exposed * rank.step_seconds * 1000
        communication = min(exposed, run.waiting.communication * step)
        rows[f"{rank.rank} {rank.host}"] = [step - exposed, exposed - communication, communication]
    plots.append(svg.bars("Time per step on each rank, ms; slowest rank first", _STEP, rows))
    for key, title in (("host_cpu_percent", "Cores in use"), ("host_memory_percent", "Memory in use")):
        ranks_by_host = {rank.host: rank for rank in run.ranks}
        lines = {host: gauge(ranks_by_host[host], key) for host in run.hosts[:_LINES]}
        if hosts := {host: line for host, line in lines.items() if line}:
            plots.append(svg.lines(title, hosts, "s", "% of the host", 100.0))
    gpus = {
        f"rank {rank.rank}": gauge(rank, "gpu_percent")
        for rank in run.ranks[:_LINES] if rank.gpu is not None
    }  # fmt: skip
    if gpus:
        plots.append(svg.lines("GPUs in use", gpus, "s", "%", 100.0))
    return plots


def _ranks_table(run: RunMetrics) -> str:
    rows = []
    for one in run.ranks:
        last = one.rows[-1]
        rows.append([
            str(one.rank), one.host, str(last["steps"]), milliseconds(one.step_seconds), f"{one.exposed:.1%}",
            f"{one.cores:.2f}", "–" if one.gpu is None else f"{one.gpu:.0f}%",
            f"{last['rss_bytes'] / 1e9:.2f}", f"{last['bytes'] / 1e9:.3g}",
        ])  # fmt: skip
    names = ("rank", "host", "steps", "ms/step", "waits", "cores", "GPU", "memory, GB", "exchanged, GB")
    slow = run.ranks.index(run.slowest) if run.size > 1 and run.waiting.skew >= WORTH else -1
    return _table(names, rows, slow)


def _scaling(runs: Sequence[RunMetrics], batch: int) -> str:
    ordered = sorted(runs, key=lambda run: run.size)
    smallest = ordered[0]
    rates = [(run.size, run.steps_per_second * (run.size * batch if batch else 1)) for run in ordered]
    unit = "samples/s" if batch else "steps/s"
    ideal = smallest.steps_per_second * (batch or 1)
    series = {"measured": rates, "without loss": [(n, ideal * (n if batch else 1)) for n, _ in rates]}
    rows = [
        [run.directory.name, str(run.size), str(len(run.hosts)), f"{rate:.4g}",
         f"{run.steps_per_second / smallest.steps_per_second:.0%}", f"{run.waiting.communication:.0%}",
         f"{run.waiting.skew:.0%}", f"{fmean([rank.cores for rank in run.ranks]):.2f}"]
        for run, (_, rate) in zip(ordered, rates, strict=True)
    ]  # fmt: skip
    names = ("run", "ranks", "hosts", unit, "efficiency", "communication", "skew", "cores per rank")
    note = "<p>Efficiency is steps/s relative to the smallest run, with the same batch size on each rank.</p>"
    plot = svg.lines("Speed by ranks", series, "ranks", unit)
    return f'<div class="plots">{plot}</div>{_table(names, rows)}{note}'
