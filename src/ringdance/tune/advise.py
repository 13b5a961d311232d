"""``ringdance advise``: scale a run up, out, or not at all; by its figures and the planner."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from ringdance.launch.parser import Parser, as_program
from ringdance.observe.figures import Run, read_run
from ringdance.observe.limits import RunLimit, judge
from ringdance.observe.report import trace_of, uneven_share
from ringdance.tune.catalog import Curve, Instance, curves, instance
from ringdance.tune.planner import Options, Row, Workload, expected_largest, from_bench, predict

_EPILOG = """\
examples:
  ringdance run -np 4 --output-filename logs python train.py
  ringdance advise logs                                           what to do first
  ringdance advise logs --gbits 25 --batch-size 32                and whether twice the hosts are worth it
  ringdance advise logs --instance p3.16xlarge --batch-size 256   and whether CPU hosts would be cheaper

Every sentence names the figure that it rests on. Where a run has none, it says what is missing.
"""
_WORTH = 0.75  # efficiency of the additional hosts from which on they are advised
_PARTS = 24  # gradients that stand for those of a run, of which only the sum is known
_BUSY_CORES, _BUSY_GPU = 75.0, 90.0  # percent


@dataclass
class Advice:
    """What to do about a run.

    Attributes:
        scale: up, out or not.
        because: sentences, each with its figure.
        missing: what is not known, and how to get it.
    """

    scale: str
    because: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """``ringdance advise``: `argv` without the program and ``advise``; returns the exit code."""
    parser = Parser(
        prog="ringdance advise", epilog=_EPILOG,
        description="Say whether to scale a run up, out or not at all, and what to do first.",
    )  # fmt: skip
    add = parser.add_argument
    add("directory", metavar="RUN_DIR", type=Path, help="of `ringdance run --output-filename`")
    add("--timeline", type=Path, metavar="FILE", help="of the run (default: one in RUN_DIR)")
    add("--batch-size", type=int, default=0, metavar="N", help="samples of a rank and step")
    add("--gbits", type=float, default=0.0, metavar="G", help="of the network between hosts, Gbit/s")
    add("--instance", metavar="NAME|FILE", help="its hosts, as of `ringdance plan --list`")
    add("--against", default="c5.18xlarge", metavar="NAME|FILE", help="CPU hosts instead (default c5.18xlarge)")
    add("--from", dest="bench", type=Path, metavar="FILE", help="`ringdance bench train --json` of such a CPU host")
    add("--json", action="store_true", help="as JSON")

    def action() -> int:
        arguments = parser.parse_args(list(argv))
        run = read_run(arguments.directory)
        limit = judge(run, uneven_share(trace_of(run, arguments.timeline)))
        found = advise(run, limit, arguments)
        if arguments.json:
            print(json.dumps({"bound": limit.bound, **vars(found)}, indent=1))
            return 0
        print(f"Bound by {limit.bound}. {limit.sentence}\n{_TITLES[found.scale]}")
        for title, texts in (("", found.because), ("Not known:", found.missing)):
            print(title, end="\n" * bool(title and texts))
            for text in texts:
                print(textwrap.fill(text, 100, initial_indent="  - ", subsequent_indent="    "))
        return 0

    return as_program("ringdance advise", action)


_TITLES = {
    "not": "Do not scale: first this.", "up": "Scale up: fill the hosts that there are.",
    "out": "Scale out: more hosts are worth it.",
}  # fmt: skip


def advise(run: Run, limit: RunLimit, arguments: argparse.Namespace) -> Advice:
    """Return what to do, by what limits the run.

    Args:
        run: its figures.
        limit: the verdict of `ringdance report`.
        arguments: batch_size, gbits, instance, against, bench: as of the command line, or None and 0.
    """
    on = instance(arguments.instance) if arguments.instance else None
    step = 1 / run.steps_per_second
    found = Advice("not")
    own = 1 - fmean([one.exposed for one in run.ranks])
    if limit.bound == "communication":
        _communication(run, found, step, arguments.gbits or (on.gbits if on else 0.0))
    elif limit.bound == "computation":
        _computation(run, found, step, arguments.gbits or (on.gbits if on else 0.0))
    elif limit.bound == "skew" and run.skew > 0:
        found.because.append(
            f"The others wait {run.skew:.0%} of each step for rank {run.slowest.rank} on {run.slowest.host}. Were it as "
            f"fast as they are, a step would take {step * (1 - run.skew) * 1e3:.3g} ms instead of {step * 1e3:.3g}: "
            f"{1 / (1 - run.skew):.2f} times as fast, on the hosts that there are. More ranks would wait too."
        )
    elif limit.bound == "input":
        cores = fmean([one.cores for one in run.ranks])
        found.because.append(
            f"Ranks are not waiting for others for {own:.0%} of a step of {step * 1e3:.3g} ms, and yet use "
            f"{cores:.2f} cores. More ranks read from the same place: they bring what it has left, faster ones nothing."
        )
        found.missing.append("how fast the step is without its input: `ringdance bench input -- CMD` measures it")
    else:
        found.because.append(f"{limit.evidence[0]} What limits it is not a number of hosts.")
    if limit.bound != "computation":
        found.because.append(limit.next_step)
    _cpu_hosts(run, found, on, arguments)
    if found.scale == "out":
        _learning_rate(run, found, arguments.batch_size)
    return found


def _load(run: Run, step: float) -> Workload:
    """Return the run's step for the planner: its bytes as equal parts, over the last two thirds."""
    last = run.slowest.rows[-1]
    compute = step * (1 - run.communication)
    size = int(last["bytes"] / last["steps"]) // _PARTS
    ready = [compute * (1 / 3 + 2 / 3 * part / _PARTS) for part in range(1, _PARTS + 1)]
    spread = max(0.0, run.skew) * step / expected_largest(run.size) if run.size > 1 else 0.0
    gpus = run.ranks[0].gpu is not None
    return Workload("run", 1, compute, tuple((size, at) for at in ready), spread, run.size, 0.0 if gpus else 1e-9, "")


def _rows(run: Run, step: float, gbits: float, factor: int, wire: str = "float32") -> tuple[Row, Row]:
    """Return the prediction for the run as it is, and for so many times the hosts or another wire type."""
    load, per_host = _load(run, step), max(1, run.size // len(run.hosts))
    cores = int(run.mean("host_cores")) or per_host
    on = Instance("hosts", cores, gbits, gpus=0 if load.cores else per_host)
    options = Options(per_host)
    changed = predict(load, on, run.size * factor, replace(options, wire=wire))
    return predict(load, on, run.size, options), changed


def _communication(run: Run, found: Advice, step: float, gbits: float) -> None:
    found.because.append(
        f"Even the rank that waits least waits {run.communication:.0%} of a step of {step * 1e3:.3g} ms for exchanges: "
        f"without them {run.size} ranks would do what {run.size / (1 - run.communication):.3g} do now."
    )
    last = run.slowest.rows[-1]
    if not gbits:
        found.missing.append(_NO_NETWORK)
        return
    now, half = _rows(run, step, gbits, 1, "float16")
    _, more = _rows(run, step, gbits, 2)
    found.because.append(
        f"{last['bytes'] / last['steps'] / 1e6:,.1f} MB are exchanged in a step. At {gbits:g} Gbit/s the planner expects "
        f"{now.step_seconds * 1e3:.3g} ms a step, {half.step_seconds * 1e3:.3g} with 16 bits on the wire, and of twice "
        f"the hosts {2 * more.efficiency / now.efficiency:.2f} times the speed."
    )


_NO_NETWORK = (
    "what more hosts would bring: the network between them is not in the run's figures. `ringdance doctor -H h1,h2` "
    "measures it, or name it: --gbits 25, or --instance"
)


def _computation(run: Run, found: Advice, step: float, gbits: float) -> None:
    gpus = [one.gpu for one in run.ranks if one.gpu is not None]
    used, busy, what = (
        (fmean(gpus), _BUSY_GPU, "GPUs") if gpus
        else (max(run.mean("host_cpu_percent", host) for host in run.hosts), _BUSY_CORES, "cores")
    )  # fmt: skip
    if used < busy:
        found.scale = "up"
        how = "a larger batch, or more workers of the data loader" if gpus else "more threads or more ranks on each host"
        found.because.append(
            f"The {what} are in use for {used:.0f}%: the same hosts can do up to {100 / max(used, 1.0):.1f} times as "
            f"much. Try {how}{'' if gpus else ' (`ringdance tune threads` finds out)'}, before more hosts are paid."
        )
        return
    found.because.append(
        f"The {what} are in use for {used:.0f}%, and ranks wait {run.communication:.0%} of a step for exchanges: what "
        "there is is used."
    )
    if not gbits:
        found.missing.append(_NO_NETWORK)
        return
    now, more = _rows(run, step, gbits, 2)
    gain = 2 * more.efficiency / now.efficiency
    found.scale = "out" if gain - 1 >= _WORTH else "not"
    found.because.append(
        f"At {gbits:g} Gbit/s the planner expects of twice the hosts {gain:.2f} times the speed: the additional ones "
        f"work at {gain - 1:.0%}, {'above' if gain - 1 >= _WORTH else 'below'} the {_WORTH:.0%} from which on they are "
        "advised."
    )


def _cpu_hosts(run: Run, found: Advice, on: Instance | None, arguments: argparse.Namespace) -> None:
    """Say from which speed on CPU hosts are cheaper than the run's GPUs."""
    gpus = [one.gpu for one in run.ranks if one.gpu is not None]
    if not gpus:
        return
    other = instance(arguments.against)
    if on is None or on.price is None or other.price is None or not arguments.batch_size:
        found.missing.append("whether CPU hosts would be cheaper: give --instance (with its price) and --batch-size")
        return
    rate = run.steps_per_second * arguments.batch_size * run.size / len(run.hosts)
    even = rate * other.price / on.price
    text = (
        f"A host does {rate:,.4g} samples/s for ${on.price:g} an hour, its GPUs in use for {fmean(gpus):.0f}%. "
        f"{other.name} costs ${other.price:g}: it is cheaper if it does more than {even:,.4g} samples/s"
    )
    if arguments.bench is None:
        found.because.append(f"{text}.")
        found.missing.append(f"what {other.name} does: measure it there by `ringdance bench train`, then --from FILE")
        return
    load = from_bench(arguments.bench)
    there = predict(load, other, Options().per_host(load, other), Options()).samples_per_second
    verdict = "CPU hosts are cheaper" if there > even else "they are not"
    found.because.append(f"{text}; by {load.source} {there:,.4g}: {verdict}.")


def _learning_rate(run: Run, found: Advice, batch_size: int) -> None:
    """Say how far to scale the learning rate with the batch of twice the ranks."""
    if not batch_size:
        found.missing.append("how to scale the learning rate: give --batch-size, the samples of a rank and step")
        return
    curve: Curve = curves()["resnet50"]
    now, more = (curve.at(batch_size * run.size * factor) for factor in (1, 2))
    batch = batch_size * run.size
    if more is None or now is None:
        found.because.append(
            f"Twice the ranks make a batch of {2 * batch:,}; MLPerf's reference points of ResNet-50 end at "
            f"{curve.points[-1][0]:,}: give each rank a smaller batch, or train a little to see whether it converges."
        )
        return
    found.because.append(
        f"Twice the ranks make a batch of {2 * batch:,} instead of {batch:,}. Scaled in full, the learning rate doubles; "
        f"by MLPerf's reference points of ResNet-50 ({curve.what}) it is {more[1] / now[1]:.2f} times as high, with "
        f"{more[2]:.3g} epochs of warm-up instead of {now[2]:.3g}, and {more[0]:.3g} epochs instead of {now[0]:.3g} "
        f"reach the same: the gain in time is {now[0] / more[0]:.0%} of that in speed."
    )
