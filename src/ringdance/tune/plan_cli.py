"""``ringdance plan``: images per second, hours and money on other machines, before they are rented."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser, as_program
from ringdance.tune import planner
from ringdance.tune.catalog import Instance, curve, instance, instances, models
from ringdance.tune.planner import Options, Row, Workload

_EPILOG = """\
examples:
  ringdance bench train --model resnet50 --framework torch --np 1,2 --json bench.json
  ringdance plan --from bench.json --instance c5.18xlarge --np 4,32,256 --samples 1281167 --epochs 90
  ringdance plan --model resnet50 --images-per-second 395 --instance p3.16xlarge --to-accuracy 75.9 --deadline 2h
  ringdance plan --model resnet50 --images-per-second 5874 --of 8 --instance p3.16xlarge --epochs 90 --budget 100
  ringdance plan --from bench.json --instance mine.yaml --np 64 --chakra traces

mine.yaml has lines as `cores: 32`: cores and gbits, and what there is of gpus, gpu, nvlink (GB/s of a GPU), rdma
(true or false), price (dollars for an hour) and as_of (its date). A plan is a prediction: at its end it lists
what it assumes.
"""
_HOURS = {"h": 1.0, "m": 1 / 60, "min": 1 / 60, "d": 24.0}
_MOST = 512  # machines


def main(argv: Sequence[str]) -> int:
    """``ringdance plan``: `argv` without the program and ``plan``; returns the exit code."""
    parser = _parser()

    def action() -> int:
        arguments = parser.parse_args(list(argv))
        if arguments.list:
            _list()
            return 0
        return _plan(arguments)

    return as_program("ringdance plan", action)


def _parser() -> Parser:
    parser = Parser(
        prog="ringdance plan",
        description="Predict a training on other machines: images/s, efficiency, hours and money.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--from", dest="bench", type=Path, metavar="FILE", help="JSON of `ringdance bench train`")
    text = f"instead: a model whose gradients are known ({', '.join(models())})"
    add("--model", metavar="NAME", help=text)
    text = "rate of the model on one rank; with --from: of a rank there, such as a faster GPU"
    add("--images-per-second", type=_positive, metavar="R", help=text)
    add("--of", type=int, default=1, metavar="N", help="the rate is that of N ranks together (default 1)")
    add("--batch", type=int, metavar="N", help="samples of a rank and step (default: that of the model)")
    text = "standard deviation of a rank's step as a share of it (default: as measured; with --model 0.15)"
    add("--spread", type=float, metavar="SHARE", help=text)
    add("--instance", metavar="NAME|FILE", help="the machines: a known kind, or a .yaml or .toml file")
    add("--list", action="store_true", help="show the kinds of machines that are known")
    add("--np", type=_numbers, metavar="N,N", help="numbers of ranks (default: 1, 2, 4, ... 32 machines)")
    text = "ranks on a machine (default: its GPUs, or as many as its cores are enough for)"
    add("--ranks-per-host", type=int, default=0, metavar="N", help=text)
    add("--gbits", type=_positive, metavar="G", help="another network, Gbit/s")
    text = "that simulated hosts share the cores of one machine: how many do (default 1)"
    add("--shared-cores", type=int, default=1, metavar="N", help=text)
    kinds = ("float32", "float16", "bfloat16")
    add("--wire", choices=kinds, default="float32", help="what gradients are sent as (default float32)")
    add("--samples", type=int, metavar="N", help="of an epoch (default: those of the model's data set)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--epochs", type=_positive, metavar="N", help="epochs to train")
    text = "as many as the batch needs, by MLPerf's reference points"
    how.add_argument("--to-accuracy", type=_positive, metavar="A", help=text)
    add("--price", type=_positive, metavar="P", help="dollars for an hour of a machine")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--deadline", type=_hours, metavar="T", help="such as 2h or 90m: the fewest machines")
    goal.add_argument("--budget", type=_positive, metavar="P", help="dollars: the fastest for it")
    add("--plot", type=Path, metavar="FILE", help="draw it as .svg or .png")
    text = "write the step's traces for simulators, a file for each rank; with one --np"
    add("--chakra", type=Path, metavar="DIR", help=text)
    add("--json", action="store_true", help="as JSON")
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    if not arguments.instance:
        raise LaunchError("give the machines: --instance p3.16xlarge, or a file (all that are known: --list)")
    if (arguments.bench is None) == (arguments.model is None):
        raise LaunchError("give what is trained: --from bench.json, or --model NAME --images-per-second R")
    for name in ("of", "shared_cores", "batch", "samples"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise LaunchError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if arguments.ranks_per_host < 0 or (arguments.spread or 0) < 0:
        raise LaunchError("--ranks-per-host and --spread are 0 or more")
    on = instance(arguments.instance)
    on = replace(on, gbits=arguments.gbits or on.gbits)
    if arguments.price:
        on = replace(on, price=arguments.price, as_of="--price")
    options = Options(arguments.ranks_per_host, arguments.wire, arguments.shared_cores, arguments.samples or 0)
    load, options = _load(arguments, on, options)
    if (arguments.deadline or arguments.budget) and not (options.samples and (options.epochs or options.curve)):
        raise LaunchError("--deadline and --budget need to know the work: --samples N and --epochs N or --to-accuracy")
    if arguments.budget and on.price is None:
        raise LaunchError(f"the price of {on.name} is not known; give --price")
    per_host = options.per_host(load, on)
    ranks = arguments.np or [per_host * 2**power for power in range(6)]
    rows = [planner.predict(load, on, one, options) for one in ranks]
    best = None
    if arguments.deadline or arguments.budget:
        best, tried = planner.choose(
            lambda hosts: planner.predict(load, on, hosts * per_host, options), _MOST,
            arguments.deadline or 0.0, arguments.budget or 0.0,
        )  # fmt: skip
        verdict = _verdict(best, list(tried.values()), arguments)
    assumed = assumptions(load, on, options)
    if arguments.json:
        more = {"best": asdict(best) if best else None, "verdict": verdict} if arguments.deadline or arguments.budget else {}
        print(json.dumps({"rows": [asdict(row) for row in rows], **more, "assumptions": assumed}, indent=1))
    else:
        console = Console()
        console.print(table(rows, load, on))
        if arguments.deadline or arguments.budget:
            console.print(verdict, style="bold", highlight=False)
        console.print(Panel("\n".join(f"- {line}" for line in assumed), title="Assumptions"), highlight=False)
    if arguments.plot:
        _plot(arguments.plot, rows, load)
    if arguments.chakra:
        if len(ranks) != 1:
            raise LaunchError("--chakra writes the traces of one size: give one number, such as --np 64")
        from ringdance.tune.chakra import write_step

        files = write_step(arguments.chakra, load.gradients, load.compute, rows[0].ranks)
        if not arguments.json:
            print(f"The step's traces are {files[0]} ... {files[-1].name}")
    return 0


def _load(
    arguments: argparse.Namespace, on: Instance, options: Options
) -> tuple[Workload, Options]:
    """Return the step, and the options with samples and epochs."""
    if arguments.bench is not None:
        load = _measured(arguments, on)
    else:
        known = models()
        if arguments.model not in known:
            raise LaunchError(
                f"--model {arguments.model} is not known; known are {', '.join(known)}. Measure any other one: "
                "ringdance bench train --json bench.json, then --from bench.json"
            )
        if not arguments.images_per_second:
            raise LaunchError("--model needs a rate: --images-per-second R, of one rank or of --of N together")
        model = known[arguments.model]
        if arguments.spread is not None:
            model = replace(model, spread=arguments.spread)
        options = replace(options, samples=options.samples or model.samples)
        batch = arguments.batch or model.batch
        load = planner.from_model(model, arguments.images_per_second, batch, on, options, arguments.of)
    if arguments.to_accuracy:
        options = replace(options, curve=curve(load.model, arguments.to_accuracy))
        options = replace(options, samples=options.samples or getattr(models().get(load.model), "samples", 0))
    return load, replace(options, epochs=arguments.epochs or 0.0)


def _measured(arguments: argparse.Namespace, on: Instance) -> Workload:
    load = planner.from_bench(arguments.bench)
    if arguments.batch and arguments.batch != load.batch:
        raise LaunchError(f"--batch {arguments.batch}: {arguments.bench} was measured with {load.batch}; measure again")
    rate = arguments.images_per_second
    if rate:
        load = load.slower(load.batch * arguments.of / rate / load.compute)
        load = replace(load, cores=0.0 if on.gpus else load.cores, source=f"{load.source} Scaled to {rate:,.5g} samples/s"
                       f"{f' of {arguments.of} ranks' if arguments.of > 1 else ' of a rank'}.")  # fmt: skip
    elif bool(on.gpus) == bool(load.cores):
        there, here = ("GPUs", "CPUs") if on.gpus else ("CPUs", "GPUs")
        raise LaunchError(
            f"{arguments.bench} was measured on {here}, and {on.name} trains on {there}: give the rate of one of "
            "its ranks, --images-per-second R, or measure there"
        )
    if arguments.spread is not None:
        load = replace(load, spread=arguments.spread * load.compute)
    return load


def table(rows: Sequence[Row], load: Workload, on: Instance) -> Table:
    """Return the predictions as a table."""
    found = Table(box=SIMPLE_HEAD, title=f"{load.model} on {on.name}", title_justify="left", pad_edge=False)
    names = ["ranks", "machines", "samples/s", "efficiency", "step ms", "exposed ms", "skew ms"]
    timed, priced = any(row.hours for row in rows), any(row.money for row in rows)
    for name in names + ["batch", "epochs", "hours"] * timed + ["$"] * priced:
        found.add_column(name, justify="right")
    for row in rows:
        cells = [
            str(row.ranks), str(row.hosts), f"{row.samples_per_second:,.4g}" if row.samples_per_second < 1000
            else f"{row.samples_per_second:,.0f}", f"{row.efficiency:.0%}", f"{row.step_seconds * 1e3:,.1f}",
            f"{row.exposed_seconds * 1e3:,.1f}", f"{row.skew_seconds * 1e3:,.1f}",
        ]  # fmt: skip
        if timed:
            cells += [f"{row.batch:,}", "-" if row.epochs is None else f"{row.epochs:.3g}", _number(row.hours)]
        found.add_row(*cells, *[_number(row.money)] * priced)
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def assumptions(load: Workload, on: Instance, options: Options) -> list[str]:
    """Return everything that a plan assumes, as sentences."""
    per_host = options.per_host(load, on)
    base = planner.machine(load, on, per_host, options.crowd)
    how = "NCCL" if not load.cores else "MPI over TCP"
    found = [
        f"Step: {load.source} {len(load.gradients)} gradients, {load.bytes / 1e6:,.1f} MB in float32.",
        f"Exchange: Ringdance's own plans on simulated hosts, sent as {options.wire}, with the default settings.",
        f"Machines: {per_host} ranks on each; {how} gets {base.bandwidth * 8e-9:.3g} of {on.gbits:g} Gbit/s between "
        f"them, latency {base.latency * 1e6:.0f} us; no other traffic, no congestion.",
        f"Skew: a rank's step has a standard deviation of {load.spread / load.compute:.1%} ({load.spread * 1e3:.3g} "
        "ms), normal and independent; all wait for the slowest.",
        "A rank computes as fast as it was measured, whatever its machine; its input keeps up.",
    ]
    if load.cores:
        found[-1] = (
            f"A rank computes on {load.cores:g} cores, each as fast as those measured; a machine has {on.cores}"
            f"{f', which {options.crowd} hosts share' if options.crowd > 1 else ''}. Its input keeps up."
        )
    if options.epochs and options.samples:
        found.append(f"Work: {options.epochs:g} epochs of {options.samples:,} samples, whatever the batch.")
    if options.curve and options.samples:
        points = options.curve.points
        found.append(
            f"Work: epochs of {options.samples:,} samples to {options.curve.target:g} ({options.curve.what}) by MLPerf's "
            f"reference points: {points[0][1]:g} up to batch {points[0][0]:,}, {points[-1][1]:g} at "
            f"{points[-1][0]:,}; beyond it nothing is known (-)."
        )
    if options.samples and (options.epochs or options.curve):
        found.append("Hours are those of training: no start, evaluation, checkpoints or failures.")
        price = "not known (--price)" if on.price is None else f"${on.price:g} for an hour, as of {on.as_of or 'its file'}"
        found.append(f"Price of {on.name}: {price}; whole machines, by the second.")
    return found


def _verdict(best: Row | None, tried: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Return in a sentence which number of machines to take."""
    limit = f"{arguments.deadline:.3g} hours" if arguments.deadline else f"${arguments.budget:,.2f}"
    if best is None:
        known = [row for row in tried if row.hours is not None]
        if not known:
            return f"No number of machines: the batch of even {tried[0].hosts} is beyond the reference points."
        if arguments.deadline:
            row = min(known, key=lambda one: one.hours or 0.0)
            return f"No number of machines up to {_MOST} keeps {limit}: the fastest, {row.hosts}, needs {_number(row.hours)} hours."
        row = min(known, key=lambda one: one.money or 0.0)
        return f"No number of machines keeps {limit}: the cheapest, {row.hosts}, costs ${_number(row.money)}."
    cost = f" and ${_number(best.money)}" if best.money is not None else ""
    what = "the fewest that keep" if arguments.deadline else "the fastest for"
    return (
        f"Take {best.hosts} machine{'s' * (best.hosts > 1)} ({best.ranks} ranks): {_number(best.hours)} hours{cost}, "
        f"{what} {limit}."
    )


def _plot(file: Path, rows: Sequence[Row], load: Workload) -> None:
    from ringdance.tune.plots import lines

    rate = load.batch / load.compute
    panels = {
        "Throughput": {
            "predicted": [(row.ranks, row.samples_per_second) for row in rows],
            "bound": [(row.ranks, rate * row.ranks) for row in rows],
        }
    }
    labels = ["samples/s"]
    if any(row.hours for row in rows):
        panels["Time"] = {"predicted": [(row.ranks, row.hours) for row in rows if row.hours is not None]}
        labels.append("hours")
    if any(row.money for row in rows):
        panels["Cost"] = {"predicted": [(row.ranks, row.money) for row in rows if row.money is not None]}
        labels.append("dollars")
    written = lines(file, panels, "ranks", labels, logarithmic="x")
    print(f"The plots are {' and '.join(map(str, written))}")


def _list() -> None:
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("instance", "GPUs", "cores", "Gbit/s", "NVLink GB/s", "$/h", "as of"):
        found.add_column(name, justify="left" if name == "instance" else "right")
    for name, one in instances().items():
        gpus = f"{one.gpus} {one.gpu}" if one.gpus else "-"
        found.add_row(name, gpus, str(one.cores), f"{one.gbits:g}", f"{one.nvlink:g}" if one.nvlink else "-",
                      _number(one.price), one.as_of)  # fmt: skip
    Console().print(found)


def _positive(text: str) -> float:
    if not 0 < (found := float(text)) < 1e15:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return found


def _numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")] if re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) else []
    if not found or min(found) < 1 or max(found) > 100_000:
        raise argparse.ArgumentTypeError(f"{text} is no list of numbers of ranks, such as 8,32,256")
    return found


def _hours(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(h|m|min|d)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text} is no time, such as 2h, 90m or 1.5d")
    return float(match[1]) * _HOURS[match[2]]
