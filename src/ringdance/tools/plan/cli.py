"""``ringdance plan``: images per second, hours and money on other machines, before they are rented."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from ringdance.core.reports.judging import TAKEN
from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser, as_program, counts, number, positive
from ringdance.submit.instances import Instance, instance, instances
from ringdance.tools.plan import planner
from ringdance.tools.plan.models import curve, models
from ringdance.tools.plan.planner import Options, Row, Workload, machine, predict

_EPILOG = """\
examples:
  ringdance bench train --model resnet50 --framework torch --np 1,2 --output bench.json
  ringdance plan --from bench.json --instance c5.18xlarge --np 4,32,256 --samples 1281167 --epochs 90
  ringdance plan --model resnet50 --images-per-second 395 --instance p3.16xlarge --epochs 90 --deadline 4h
  ringdance plan --model resnet50 --images-per-second 5874 --of 8 --instance p3.16xlarge --to-accuracy 75.9
  ringdance run -np 4 --output-filename logs python train.py
  ringdance plan --from logs --batch 32 --instance mine.toml --np 4,8,16          is it worth more hosts?

mine.toml has lines as `cores = 32`: cores and gbits, and what there is of gpus, gpu, nvlink (GB/s of a GPU),
rdma (true or false), tcp_gbits (what NCCL gets over TCP at most), price (dollars for an hour) and as_of (its
date). A plan ends with what it assumes.
"""
_HOURS = {"h": 1.0, "m": 1 / 60, "min": 1 / 60, "s": 1 / 3600, "d": 24.0}
_MOST, _FAR = 512, 64  # hosts; times the ranks of the measurement
_COLUMNS = {
    "ranks": "ranks", "hosts": "hosts", "samples/s": "samples_per_second", "by rank": "efficiency",
    "by host": "host_efficiency", "step": "step_seconds", "exposed": "exposed_seconds",
    "skew": "skew_seconds", "batch": "batch", "epochs": "epochs", "hours": "hours", "$": "money",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """``ringdance plan``: `argv` without the program and ``plan``; returns the exit code."""
    parser = _parser()
    return as_program("ringdance plan", lambda: _plan(parser.parse_args(list(argv))))


def _parser() -> Parser:
    parser = Parser(
        prog="ringdance plan",
        description="Predict a training on other machines: images/s, efficiency, hours and money.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    text = "JSON of `ringdance bench train --output`, or the directory of `ringdance run --output-filename`"
    add("--from", dest="bench", type=Path, metavar="FILE|RUN_DIR", help=text)
    text = f"instead: a model whose gradients are known ({', '.join(models())})"
    add("--model", metavar="NAME", help=text)
    text = "rate of the model on one rank; with --from: of a rank there, such as a faster GPU"
    add("--images-per-second", type=number, metavar="R", help=text)
    add("--of", type=positive, default=1, metavar="N", help="the rate is of N ranks together (default 1)")
    add("--batch", type=positive, metavar="N", help="samples of a rank and step (default: that of the model)")
    text = f"input from memory; from files it lets hosts with GPUs deviate by {planner.HOST_SPREAD}"
    add("--synthetic", action="store_true", help=text)
    text = f"the machines, a .toml file or one of {', '.join(instances())}"
    add("--instance", required=True, metavar="NAME|FILE", help=text)
    text = "numbers of ranks (default: of 1, 2, 4, ... machines, up to 32)"
    add("--np", "-np", type=counts, metavar="N,N", help=text)
    text = "ranks on a machine (default: its GPUs, or as many as its cores are enough for)"
    add("--ranks-per-host", type=positive, default=0, metavar="N", help=text)
    add("--gbits", type=number, metavar="G", help="another network, Gbit/s")
    kinds = ("float32", "float16", "bfloat16")
    add("--wire", choices=kinds, default="float32", help="what gradients are sent as (default float32)")
    add("--samples", type=positive, default=0, metavar="N", help="of an epoch (default: that of the model)")
    how, goal = (parser.add_mutually_exclusive_group() for _ in range(2))
    how.add_argument("--epochs", type=number, default=0.0, metavar="N", help="epochs to train")
    text = "as many as the batch needs, by MLPerf's reference points"
    how.add_argument("--to-accuracy", type=number, metavar="A", help=text)
    add("--price", type=number, metavar="P", help="dollars for an hour of a machine")
    text = "such as 2h or 90m: find the fewest machines"
    goal.add_argument("--deadline", type=_hours, default=0.0, metavar="T", help=text)
    text = "dollars: find the fastest for it"
    goal.add_argument("--budget", type=number, default=0.0, metavar="P", help=text)
    add("--json", action="store_true", help="as JSON")
    return parser


def _plan(given: argparse.Namespace) -> int:
    on = instance(given.instance)
    changed = {"gbits": given.gbits} if given.gbits else {}
    on = replace(on, **changed, **({"price": given.price, "as_of": "--price"} if given.price else {}))
    options = Options(given.ranks_per_host, given.wire, given.samples, given.epochs)
    if on.gpus and not given.synthetic:
        options = replace(options, host_spread=planner.HOST_SPREAD)
    load, options = _load(given, on, options)
    aim, work = bool(given.deadline or given.budget), bool(options.epochs or options.curve)
    if not work and (aim or given.samples or given.price):
        raise LaunchError("--deadline, --budget, --samples and --price need --epochs N or --to-accuracy A")
    if work and not options.samples:
        raise LaunchError(f"hours need an epoch's samples, and {load.model} has no usual ones: --samples N")
    if given.budget and on.price is None:
        raise LaunchError(f"--budget: the price of {on.name} is not known. Give it: --price P")
    per_host = options.per_host(load, on)
    ranks = given.np or [per_host * 2**power for power in range(6)]
    of_ranks = cache(lambda ranks: predict(load, on, ranks, options))
    whole, rows = of_ranks(per_host).step_seconds, [of_ranks(one) for one in ranks]
    for place, row in enumerate(rows):
        if row.ranks >= per_host:
            rows[place] = replace(row, host_efficiency=whole / row.step_seconds)
    best, verdict = None, ""
    if load.others >= TAKEN:
        verdict = f"Other programs used {load.others:.0%} of the cores: no advice. Measure again alone."
    elif aim:
        best, tried = planner.choose(
            lambda hosts: of_ranks(hosts * per_host), _MOST, given.deadline, given.budget
        )
        verdict = _verdict(best, list(tried.values()), given)
        if best and best.ranks > _FAR * load.ranks:
            verdict += f" That is {best.ranks / load.ranks:,.0f} times the ranks measured: measure more."
    rounded = [(one, row) for one, row in zip(ranks, rows, strict=True) if one != row.ranks]
    assumed = assumptions(load, on, options, rounded)
    if given.json:
        shown = {"rows": [asdict(row) for row in rows], "best": best and asdict(best), "verdict": verdict}
        print(json.dumps({**shown, "assumptions": assumed}, indent=1))
    else:
        console = Console(highlight=False)
        console.print(table(rows, load, on))
        if verdict:
            console.print(verdict, style="bold")
        console.print(Panel("\n".join(f"- {line}" for line in assumed), title="Assumptions"))
    return 0


def _load(given: argparse.Namespace, on: Instance, options: Options) -> tuple[Workload, Options]:
    """Return the step, and the options with what its model says."""
    if (given.bench is None) == (given.model is None):
        raise LaunchError("say what is trained: --from bench.json, or --model NAME --images-per-second R")
    known = models()
    if given.bench is not None:
        load = _measured(given, on, options)
    elif given.model not in known:
        raise LaunchError(
            f"--model {given.model} is not known; known are {', '.join(known)}. Measure it: `ringdance bench "
            "train --output bench.json`, then --from bench.json"
        )
    if given.of > 1 and not given.images_per_second:
        raise LaunchError(f"--of {given.of}: give the rate of these ranks together, --images-per-second R")
    if given.bench is None and not given.images_per_second:
        raise LaunchError("--model needs its rate: --images-per-second R, of one rank or of --of N together")
    model = known.get(load.model if given.bench else given.model)
    if model is not None:
        options = replace(options, samples=options.samples or model.samples)
    if given.bench is None and model is not None:
        rate, batch = given.images_per_second, given.batch or model.batch
        load = planner.from_model(model, rate, batch, on, options, given.of)
    if given.to_accuracy:
        options = replace(options, curve=curve(load.model, given.to_accuracy))
    return load, options


def _measured(given: argparse.Namespace, on: Instance, options: Options) -> Workload:
    rate = given.images_per_second
    if given.bench.is_dir():
        if not given.batch:
            raise LaunchError(f"--from {given.bench}: give the samples of a rank and step too, --batch N")
        load = planner.from_run(given.bench, given.batch)
    else:
        load = planner.from_bench(given.bench)
    if given.batch and given.batch != load.batch:
        again = f"ringdance bench train --model {load.model} --batch {given.batch} --output {given.bench}"
        raise LaunchError(f"--batch {given.batch}: {given.bench} is of {load.batch}. Measure it: {again}")
    if rate:
        scaled = f"{load.source} Scaled to {rate:,.5g} samples/s of {given.of} rank{'s' * (given.of > 1)}."
        cores = 0.0 if on.gpus else load.cores or on.cores
        load = replace(load, source=scaled, ranks=given.of, cores=cores, others=0.0)
        return planner.reached(load, load.batch * given.of / rate, on, options)
    if bool(on.gpus) == bool(load.cores):
        there, here = ("GPUs", "CPUs") if on.gpus else ("CPUs", "GPUs")
        raise LaunchError(
            f"{given.bench} was measured on {here}, and {on.name} trains on {there}: give the rate of one of "
            "its ranks, --images-per-second R, or measure there"
        )
    return load


def table(rows: Sequence[Row], load: Workload, on: Instance) -> Table:
    """Return the predictions as a table."""
    columns = {name: [_value(row, key) for row in rows] for name, key in _COLUMNS.items()}
    known = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
    title = (
        f"{load.model} on {on.name}; efficiency by a rank alone and by one host;\n"
        "step, exposed communication and skew in ms"
    )
    found = Table(box=SIMPLE_HEAD, title=title, title_justify="left", padding=0, show_edge=False)
    for name in known:
        found.add_column(name, justify="right")
    for row in zip(*known.values(), strict=True):
        found.add_row(*map(_cell, row))
    return found


def _value(row: Row, key: str) -> float | str | None:
    value = getattr(row, key)
    if value is None or not key.endswith(("efficiency", "_seconds")):
        return value
    return value * 1e3 if key.endswith("_seconds") else f"{value:.0%}"


def _cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    digits = 0 if isinstance(value, int) or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def assumptions(
    load: Workload, on: Instance, options: Options, rounded: Sequence[tuple[int, Row]] = ()
) -> list[str]:
    """Return everything that a plan assumes, as sentences; ``rounded``: asked for, and planned instead."""
    per_host = options.per_host(load, on)
    base = machine(load, on, per_host)
    how = "MPI over TCP" if load.cores else "NCCL"
    cores = f"on {load.cores:g} cores, of {on.cores} in a machine" if load.cores else "on a GPU"
    found = [
        f"Step: {load.source} {len(load.gradients)} gradients, {load.bytes / 1e6:,.1f} MB.",
        f"Exchange: Ringdance's plans on simulated hosts, {options.wire} on the wire, default settings.",
        f"Machines: {per_host} ranks on each; {how} gets {base.bandwidth * 8e-9:.3g} of {on.gbits:g} Gbit/s "
        f"between them, latency {base.latency * 1e6:.0f} us; no other traffic, no congestion.",
        f"Skew: a rank's step deviates by {load.spread / load.compute:.1%} ({load.spread * 1e3:.3g} ms), "
        f"a host's by {options.host_spread:.1%}, normal and independent; all wait for the slowest.",
        *[f"Whole machines: {one} ranks are {row.ranks} on {row.hosts} machines." for one, row in rounded],
        f"A rank computes {cores}, as fast as it was measured; its input keeps up.",
    ]
    if not load.cores:
        found.append(
            "Run on GPUs so far: PyTorch on one GPU, with one and two ranks. Not run: several GPUs, several "
            "hosts with GPUs; what a plan says of them was fitted to published runs of Horovod. TensorFlow, "
            "Keras, JAX and MXNet exchange through the host's memory, which is slower than this plan."
        )
    if not options.samples or not (options.epochs or options.curve):
        return found
    work = f"{options.epochs:g} epoch{'s' * (options.epochs != 1)}, whatever the batch"
    if options.curve:
        points = options.curve.points
        work = (
            f"epochs to {options.curve.target:g} ({options.curve.what}) by MLPerf's reference points: "
            f"{points[0][1]:g} up to batch {points[0][0]:,}, {points[-1][1]:g} at {points[-1][0]:,}, beyond "
            "it not known"
        )
    price = f"${on.price:g} an hour (as of {on.as_of or 'its file'})" if on.price else "not known (--price)"
    return [
        *found,
        f"Work: {options.samples:,} samples an epoch; {work}. No start, evaluation, checkpoint or failure.",
        f"Price of {on.name}: {price}; whole machines, by the second.",
    ]


def _verdict(best: Row | None, tried: Sequence[Row], given: argparse.Namespace) -> str:
    """Return in a sentence which number of machines to take."""
    hours = f"{given.deadline:.3g} hour{'s' * (given.deadline != 1)}"
    limit = hours if given.deadline else f"${given.budget:,.2f}"
    if best is not None:
        cost = f" and ${_cell(best.money)}" if best.money is not None else ""
        what = "the fewest that keep" if given.deadline else "the fastest for"
        plural = "s" * (best.hosts > 1)
        return f"Take {best.hosts} host{plural}: {_cell(best.hours)} hours{cost}, {what} {limit}."
    known = [row for row in tried if row.hours is not None]
    if not known:
        return f"No number of hosts: a batch of {tried[0].batch:,} is beyond the reference points."
    row = min(known, key=lambda one: (one.hours if given.deadline else one.money) or 0.0)
    found = f"{_cell(row.hours)} hours" + (f" and ${_cell(row.money)}" if row.money else "")
    return f"No number of hosts up to {_MOST} keeps {limit}: the nearest is {row.hosts}, with {found}."


def _hours(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(h|min|m|s|d)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text} is no time, such as 2h, 90m or 1.5d")
    return float(match[1]) * _HOURS[match[2]]
