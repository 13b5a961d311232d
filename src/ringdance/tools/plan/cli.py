"""``ringdance plan``: predict the speed, duration and cost of training on machines before you rent them."""

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
from rich.table import Column, Table

from ringdance.core.reports.judging import TAKEN
from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser, as_program, counts, number, positive
from ringdance.submit.instances import Instance, instance, instances
from ringdance.tools.plan import planner
from ringdance.tools.plan.models import curve, models
from ringdance.tools.plan.planner import PlanOptions, Row, Workload, machine, predict

_EPILOG = """\
examples:
  ringdance bench train --model resnet50 --framework torch --np 1,2 --output bench.json
  ringdance plan --from bench.json --instance c5.18xlarge --np 4,32,256 --samples 1281167 --epochs 90
  ringdance plan --model resnet50 --images-per-second 395 --instance p3.16xlarge --epochs 90 --deadline 4h
  ringdance plan --model resnet50 --images-per-second 5874 --of 8 --instance p3.16xlarge --to-accuracy 75.9
  ringdance run -np 4 --output-filename logs python train.py
  ringdance plan --from logs --batch 32 --instance mine.toml --np 4,8,16          are more hosts worth it?

mine.toml has lines such as `cores = 32`. cores and gbits are required. gpus, gpu, nvlink (GB/s per GPU), rdma
(true or false), tcp_gbits (maximum that NCCL reaches over TCP), price (dollars per hour) and as_of (date of
the price) are optional. Each plan ends with a list of its assumptions.
"""
_HOURS = {"h": 1.0, "m": 1 / 60, "min": 1 / 60, "s": 1 / 3600, "d": 24.0}
_MOST, _FAR = 512, 64  # maximum host count; ratio of planned to measured ranks that needs a warning
_COLUMNS = {
    "ranks": "ranks", "hosts": "hosts", "samples/s": "samples_per_second", "by rank": "efficiency",
    "by host": "host_efficiency", "step": "step_seconds", "exposed": "exposed_seconds",
    "skew": "skew_seconds", "batch": "batch", "epochs": "epochs", "hours": "hours", "$": "money",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance plan`` with the arguments ``argv``. Returns the exit code."""
    parser = _parser()
    return as_program("ringdance plan", lambda: _plan(parser.parse_args(list(argv))))


def _parser() -> Parser:
    parser = Parser(
        prog="ringdance plan",
        description="Predict training on other machines: images/s, efficiency, hours and cost.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    text = "JSON file of `ringdance bench train --output`, or directory of `ringdance run --output-filename`"
    add("--from", dest="bench", type=Path, metavar="FILE|RUN_DIR", help=text)
    text = f"model whose gradients are known, instead of --from ({', '.join(models())})"
    add("--model", metavar="NAME", help=text)
    text = "throughput of one rank; with --from, of one rank on the new machine, such as a faster GPU"
    add("--images-per-second", type=number, metavar="R", help=text)
    text = "number of ranks that reach this throughput together (default: 1)"
    add("--of", type=positive, default=1, metavar="N", help=text)
    add("--batch", type=positive, metavar="N", help="samples per rank and step (default: the model's)")
    text = f"input comes from memory; otherwise, step times on GPU hosts vary by {planner.HOST_SPREAD:.0%}%"
    add("--synthetic", action="store_true", help=text)
    text = f"machine to plan for: a .toml file or one of {', '.join(instances())}"
    add("--instance", required=True, metavar="NAME|FILE", help=text)
    text = "rank counts to predict (default: those that fill 1, 2, 4, ... up to 32 machines)"
    add("--np", "-np", type=counts, metavar="N,N", help=text)
    text = "ranks per machine (default: its GPUs, or as many as its cores allow)"
    add("--ranks-per-host", type=positive, default=0, metavar="N", help=text)
    add("--gbits", type=number, metavar="G", help="network bandwidth in Gbit/s (default: the machine's)")
    kinds = ("float32", "float16", "bfloat16")
    add("--wire", choices=kinds, default="float32", help="wire dtype of gradients (default: float32)")
    add("--samples", type=positive, default=0, metavar="N", help="samples per epoch (default: the model's)")
    how, goal = (parser.add_mutually_exclusive_group() for _ in range(2))
    how.add_argument("--epochs", type=number, default=0.0, metavar="N", help="number of epochs to train")
    text = "train to accuracy A; MLPerf's reference points give the number of epochs for each batch size"
    how.add_argument("--to-accuracy", type=number, metavar="A", help=text)
    add("--price", type=number, metavar="P", help="price of a machine in dollars per hour")
    text = "find the fewest machines that finish in time T, such as 2h or 90m"
    goal.add_argument("--deadline", type=_hours, default=0.0, metavar="T", help=text)
    text = "find the fastest plan that costs at most P dollars"
    goal.add_argument("--budget", type=number, default=0.0, metavar="P", help=text)
    add("--json", action="store_true", help="print JSON")
    return parser


def _plan(given: argparse.Namespace) -> int:
    on = instance(given.instance)
    changed = {"gbits": given.gbits} if given.gbits else {}
    on = replace(on, **changed, **({"price": given.price, "as_of": "--price"} if given.price else {}))
    options = PlanOptions(given.ranks_per_host, given.wire, given.samples, given.epochs)
    if on.gpus and not given.synthetic:
        options = replace(options, host_spread=planner.HOST_SPREAD)
    load, options = _load(given, on, options)
    aim, work = bool(given.deadline or given.budget), bool(options.epochs or options.curve)
    if not work and (aim or given.samples or given.price):
        raise LaunchError("--deadline, --budget, --samples and --price need --epochs N or --to-accuracy A")
    if work and not options.samples:
        raise LaunchError(f"the number of samples for {load.model} is not known. Pass --samples N.")
    if given.budget and on.price is None:
        raise LaunchError(f"--budget needs the price of {on.name}, which is not known. Pass --price P.")
    per_host = options.per_host(load, on)
    ranks = given.np or [per_host * 2**power for power in range(6)]
    of_ranks = cache(lambda ranks: predict(load, on, ranks, options))
    whole, rows = of_ranks(per_host).step_seconds, [of_ranks(count) for count in ranks]
    for place, row in enumerate(rows):
        if row.ranks >= per_host:
            rows[place] = replace(row, host_efficiency=whole / row.step_seconds)
    best, verdict = None, ""
    if load.others >= TAKEN:
        verdict = f"No advice: other programs used {load.others:.0%} of the cores. Measure without them."
    elif aim:
        best, tried = planner.choose(
            lambda hosts: of_ranks(hosts * per_host), _MOST, given.deadline, given.budget
        )
        verdict = _verdict(best, list(tried.values()), given)
        if best and best.ranks > _FAR * load.ranks:
            verdict += (
                f" That is {best.ranks / load.ranks:,.0f} times the ranks measured. Measure on more ranks."
            )
    rounded = [(count, row) for count, row in zip(ranks, rows, strict=True) if count != row.ranks]
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


def _load(given: argparse.Namespace, on: Instance, options: PlanOptions) -> tuple[Workload, PlanOptions]:
    """Return the training step, and ``options`` with missing values filled in for known models."""
    if (given.bench is None) == (given.model is None):
        raise LaunchError("pass either --from bench.json, or --model NAME --images-per-second R")
    rate, known = given.images_per_second, models()
    if given.of > 1 and not rate:
        raise LaunchError(f"--of {given.of} needs the total rate of these ranks. Pass --images-per-second R.")
    if given.bench is not None:
        load = _measured(given, on, options)
    elif given.model not in known:
        raise LaunchError(
            f"--model {given.model} is not known. Known models: {', '.join(known)}. To plan another model, "
            "measure it with `ringdance bench train --output bench.json`, and pass --from bench.json"
        )
    elif not rate:
        raise LaunchError("--model needs a rate. Pass --images-per-second R, and --of N if R is for N ranks.")
    else:
        model = known[given.model]
        load = planner.from_model(model, rate, given.batch or model.batch, on, options, given.of)
    if load.model in known:
        options = replace(options, samples=options.samples or known[load.model].samples)
    if given.to_accuracy:
        options = replace(options, curve=curve(load.model, given.to_accuracy))
    return load, options


def _measured(given: argparse.Namespace, on: Instance, options: PlanOptions) -> Workload:
    rate = given.images_per_second
    if given.bench.is_dir():
        if not given.batch:
            raise LaunchError(f"--from {given.bench} needs the samples per rank and step. Pass --batch N.")
        load = planner.from_run(given.bench, given.batch)
    else:
        load = planner.from_bench(given.bench)
    if given.batch and given.batch != load.batch:
        again = f"ringdance bench train --model {load.model} --batch {given.batch} --output {given.bench}"
        raise LaunchError(
            f"--batch {given.batch} was not measured: {given.bench} has batch size {load.batch}. Run: {again}"
        )
    if rate:
        scaled = f"{load.source} Scaled to {rate:,.5g} samples/s on {given.of} rank{'s' * (given.of > 1)}."
        cores = 0.0 if on.gpus else load.cores or on.cores
        load = replace(load, source=scaled, ranks=given.of, cores=cores, others=0.0)
        return planner.reached(load, load.batch * given.of / rate, on, options)
    if bool(on.gpus) == bool(load.cores):
        there, here = ("GPUs", "CPUs") if on.gpus else ("CPUs", "GPUs")
        raise LaunchError(
            f"{given.bench} was measured on {here}, but {on.name} trains on {there}. Pass the rate of one of "
            "its ranks (--images-per-second R), or measure on such a machine"
        )
    return load


def table(rows: Sequence[Row], load: Workload, on: Instance) -> Table:
    """Return a table of the predictions."""
    known = {
        name: key for name, key in _COLUMNS.items() if any(getattr(row, key) is not None for row in rows)
    }
    columns = [Column(name, justify="right") for name in known]
    title = (
        f"{load.model} on {on.name}; efficiency vs. one rank alone and one host;\n"
        "step, exposed communication and skew in ms"
    )
    shown = Table(*columns, box=SIMPLE_HEAD, title=title, title_justify="left", padding=0, show_edge=False)
    for row in rows:
        shown.add_row(*(_cell(_value(row, key)) for key in known.values()))
    return shown


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
    load: Workload, on: Instance, options: PlanOptions, rounded: Sequence[tuple[int, Row]] = ()
) -> list[str]:
    """Return sentences that state a plan's assumptions.

    Args:
        load: The training step.
        on: The machine type.
        options: Options of the plan.
        rounded: Requested rank counts that do not fill whole machines, each with the row used instead.
    """
    per_host = options.per_host(load, on)
    base = machine(load, on, per_host)
    how = "MPI over TCP" if load.cores else "NCCL"
    cores = f"on {load.cores:g} of {on.cores} cores" if load.cores else "on a GPU"
    sentences = [
        f"Step: {load.source} {len(load.gradients)} gradients, {load.bytes / 1e6:,.1f} MB.",
        f"Exchange: Ringdance's plans on simulated hosts, {options.wire} on the wire, default settings.",
        f"Machines: {per_host} ranks each; {how} gets {base.bandwidth * 8e-9:.3g} of {on.gbits:g} Gbit/s "
        f"between them, latency {base.latency * 1e6:.0f} us; no other traffic, no congestion.",
        f"Skew: a rank's step deviates by {load.spread / load.compute:.1%} ({load.spread * 1e3:.3g} ms), "
        f"a host's by {options.host_spread:.1%}, both normal and independent. Ranks wait for the slowest.",
        *[f"Whole machines: {n} ranks become {row.ranks} on {row.hosts} machines." for n, row in rounded],
        f"A rank computes {cores}, as fast as when it was measured, and its input keeps up.",
    ]
    if not load.cores:
        sentences.append(
            "Tested on GPUs so far: PyTorch on one GPU, with one and two ranks. Not tested: several GPUs, "
            "several hosts with GPUs. These plans are fitted to published runs of Horovod. TensorFlow "
            "and MXNet exchange through host memory, which is slower than this plan."
        )
    if not options.samples or not (options.epochs or options.curve):
        return sentences
    work = f"{options.epochs:g} epoch{'s' * (options.epochs != 1)} for any batch size"
    if options.curve:
        points = options.curve.points
        work = (
            f"epochs to {options.curve.target:g} ({options.curve.what}) by MLPerf's reference points: "
            f"{points[0][1]:g} up to batch {points[0][0]:,}, {points[-1][1]:g} at {points[-1][0]:,}, not "
            "known beyond"
        )
    price = f"${on.price:g} per hour (as of {on.as_of or 'its file'})" if on.price else "not known (--price)"
    return [
        *sentences,
        f"Work: {options.samples:,} samples/epoch; {work}. No startup, evaluation, checkpoints or failures.",
        f"Price of {on.name}: {price}; whole machines, billed by the second.",
    ]


def _verdict(best: Row | None, tried: Sequence[Row], given: argparse.Namespace) -> str:
    """Return a sentence that recommends a number of machines."""
    hours = f"{given.deadline:.3g} hour{'s' * (given.deadline != 1)}"
    limit = hours if given.deadline else f"${given.budget:,.2f}"
    if best is not None:
        cost = f" and ${_cell(best.money)}" if best.money is not None else ""
        what = "the fewest that meet" if given.deadline else "the fastest within"
        plural = "s" * (best.hosts > 1)
        return f"Take {best.hosts} host{plural}: {_cell(best.hours)} hours{cost}, {what} {limit}."
    known = [row for row in tried if row.hours is not None]
    if not known:
        return f"No advice: a batch of {tried[0].batch:,} is beyond the reference points."
    row = min(known, key=lambda row: (row.hours if given.deadline else row.money) or 0.0)
    nearest = f"{_cell(row.hours)} hours" + (f" and ${_cell(row.money)}" if row.money else "")
    return f"No plan with up to {_MOST} hosts meets {limit}. The closest uses {row.hosts} hosts: {nearest}."


def _hours(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(h|min|m|s|d)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is not a duration. Pass for example 2h, 90m or 1.5d")
    return float(match[1]) * _HOURS[match[2]]
