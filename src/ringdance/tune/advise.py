"""``ringdance advise``: scale a run up, out, or not at all; by its figures and the planner."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from ringdance.launch.parser import Parser, as_program, number, positive
from ringdance.observe.figures import Run, read_run
from ringdance.observe.limits import RunLimit, judge
from ringdance.observe.report import trace_of, uneven_share
from ringdance.tune.catalog import Instance, curves, instance
from ringdance.tune.planner import Options, Row, Workload, from_bench, predict
from ringdance.tune.simulator import expected_largest

_EPILOG = """\
examples:
  ringdance run -np 4 --output-filename logs python train.py
  ringdance advise logs                                           what to do first
  ringdance advise logs --gbits 25 --batch-size 32                and whether twice the hosts are worth it
  ringdance advise logs --instance p3.16xlarge --batch-size 256   and whether CPU hosts would be cheaper

Every sentence names the figure that it rests on. Where a run has none, it says what is missing.
"""
_WORTH = 0.75  # efficiency of additional hosts from which on they are advised
_PARTS = 24  # gradients, in place of those of a run, of which only the sum is known
_BUSY_CORES, _BUSY_GPU = 75.0, 90.0  # percent
_MOST_WAITING = 0.99  # share of a step: samples are taken in mid step, and may have nothing else
_TITLES = {
    "not": "Do not scale now.", "up": "Scale up: fill the hosts that there are.",
    "out": "Scale out: more hosts are worth it.",
}  # fmt: skip
_NO_NETWORK = (
    "what more hosts would bring: the run's figures do not have the network between them. `ringdance doctor "
    "-H h1,h2` measures it; name it by --gbits or --instance"
)


def main(argv: Sequence[str]) -> int:
    """``ringdance advise``: `argv` without the program and ``advise``; returns the exit code."""
    text = "Say whether to scale a run up, out or not at all, and what to do first."
    parser = Parser(prog="ringdance advise", description=text, epilog=_EPILOG)
    add = parser.add_argument
    add("directory", metavar="RUN_DIR", type=Path, help="of `ringdance run --output-filename`")
    add("--timeline", type=Path, metavar="FILE", help="of the run (default: one in RUN_DIR)")
    add("--batch-size", type=positive, default=0, metavar="N", help="samples of a rank and step")
    add("--gbits", type=number, default=0.0, metavar="G", help="of the network between hosts, Gbit/s")
    add("--instance", metavar="NAME|FILE", help="its hosts, named as for `ringdance plan`")
    text = "CPU hosts to compare GPUs with (default c5.18xlarge)"
    add("--against", default="c5.18xlarge", metavar="NAME|FILE", help=text)
    text = "of `ringdance bench train --output FILE` on such CPUs"
    add("--from", dest="bench", type=Path, metavar="FILE", help=text)
    add("--json", action="store_true", help="as JSON")

    def action() -> int:
        given = parser.parse_args(list(argv))
        run = read_run(given.directory)
        limit = judge(run, uneven_share(trace_of(run, given.timeline)))
        scale, because, missing = advise(run, limit, given)
        if given.json:
            found = {"bound": limit.bound, "scale": scale, "because": because, "missing": missing}
            print(json.dumps(found, indent=1))
            return 0
        print(f"Bound by {limit.bound}. {limit.sentence}\n{_TITLES[scale]}")
        for line in [*because, *(f"Not known: {text}." for text in missing)]:
            print(textwrap.fill(line, 100, initial_indent="  - ", subsequent_indent="    "))
        return 0

    return as_program("ringdance advise", action)


def advise(run: Run, limit: RunLimit, given: argparse.Namespace) -> tuple[str, list[str], list[str]]:
    """Return what to do: a key of the titles, sentences with their figures, and what is not known.

    Args:
        run: its figures.
        limit: what limits it, as `ringdance report` says.
        given: batch_size, gbits, instance, against and bench of the command line; 0 or None if not given.
    """
    on = instance(given.instance) if given.instance else None
    gbits = given.gbits or (on.gbits if on else 0.0)
    gpus = [one.gpu for one in run.ranks if one.gpu is not None]
    scale, because, missing = "not", list[str](), list[str]()
    if limit.bound == "computation":
        scale = _up_or_out(run, fmean(gpus) if gpus else None, gbits, because)
    else:
        because += [*_wasted(run, limit.bound, gbits), limit.next_step]
    if limit.bound == "input":
        missing.append("how fast the step is without its input: `ringdance bench input -- CMD` measures it")
    elif limit.bound in ("computation", "communication") and scale != "up" and not gbits:
        missing.append(_NO_NETWORK)
    if gpus:
        _compare_with_cpus(run, fmean(gpus), on, given, because, missing)
    if scale == "out" and given.batch_size:
        because.append(_learning_rate(given.batch_size * run.size))
    elif scale == "out":
        missing.append("how to scale the learning rate: give --batch-size, the samples of a rank and step")
    return scale, because, missing


def _up_or_out(run: Run, gpu: float | None, gbits: float, because: list[str]) -> str:
    """Return how to scale a run that computes, and add why; `gpu`: mean use in percent, None without."""
    used = max(run.mean("host_cpu_percent", host) for host in run.hosts) if gpu is None else gpu
    what = "cores" if gpu is None else "GPUs"
    if used < (_BUSY_CORES if gpu is None else _BUSY_GPU):
        how = "a larger batch or more workers of the loader" if gpu else "more threads or ranks on each host"
        because.append(
            f"The {what} are in use for {used:.0f}%: these hosts can do up to {100 / max(used, 1.0):.1f} "
            f"times as much. Try {how} before you pay for more."
        )
        return "up"
    because.append(
        f"The {what} are in use for {used:.0f}%, and even the rank that waits least waits for exchanges "
        f"{run.communication:.0%} of the time: what there is is used."
    )
    if not gbits:
        return "not"
    now, more = _predict(run, gbits, 1), _predict(run, gbits, 2)
    gain = more.samples_per_second / now.samples_per_second
    because.append(
        f"Twice the hosts at {gbits:g} Gbit/s are {gain:.2f} times as fast by the planner: the additional "
        f"ones work at {gain - 1:.0%}, and from {_WORTH:.0%} on they are advised."
    )
    return "out" if gain - 1 >= _WORTH else "not"


def _wasted(run: Run, bound: str, gbits: float) -> list[str]:
    """Return what a run that does not compute loses, and what it would do without that."""
    step = 1e3 / run.steps_per_second
    skew, waiting = min(_MOST_WAITING, run.skew), min(_MOST_WAITING, run.communication)
    if bound == "skew" and run.skew > 0:
        return [
            f"The others wait {run.skew:.0%} of a step for rank {run.slowest.rank} on {run.slowest.host}. "
            f"Were it as fast as they are, a step would take {step * (1 - skew):.3g} ms instead of "
            f"{step:.3g}, {1 / (1 - skew):.2f} times as fast on the same hosts; more ranks would wait "
            "for it too."
        ]
    if bound == "input":
        return [
            f"Ranks use {fmean([one.cores for one in run.ranks]):.2f} cores, and wait for others only "
            f"{fmean([one.exposed for one in run.ranks]):.0%} of a step of {step:.3g} ms: more of them would "
            "wait for their input too."
        ]
    if bound != "communication":
        return []
    found = [
        f"Even the rank that waits least waits for exchanges {run.communication:.0%} of a step of {step:.3g} "
        f"ms: without it these {run.size} ranks would do what {run.size / (1 - waiting):.3g} do "
        "now."
    ]
    if gbits:
        now, half, more = (_predict(run, gbits, *how) for how in ((1,), (1, "float16"), (2,)))
        found.append(
            f"At {gbits:g} Gbit/s the planner has {now.step_seconds * 1e3:.3g} ms for a step, "
            f"{half.step_seconds * 1e3:.3g} with 16 bits on the wire, and for twice the hosts "
            f"{more.samples_per_second / now.samples_per_second:.2f} times the speed."
        )
    return found


def _predict(run: Run, gbits: float, factor: int, wire: str = "float32") -> Row:
    """Return the planner's prediction for so many times the hosts; of gradients a run has only the sum."""
    step, last = 1 / run.steps_per_second, run.slowest.rows[-1]
    compute = step * (1 - min(_MOST_WAITING, run.communication))
    size = int(last["bytes"] / last["steps"]) // _PARTS
    gradients = [(size, compute * (1 / 3 + 2 / 3 * part / _PARTS)) for part in range(1, _PARTS + 1)]
    spread = max(0.0, run.skew) * step / expected_largest(max(2, run.size))
    gpu = run.ranks[0].gpu is not None
    load = Workload("", 1, compute, tuple(gradients), spread, run.size, 0.0 if gpu else 1e-9, "")
    per_host = max(1, run.size // len(run.hosts))
    on = Instance("", int(run.mean("host_cores")) or per_host, gbits, per_host * gpu)
    return predict(load, on, run.size * factor, Options(per_host, wire))


def _compare_with_cpus(
    run: Run, used: float, on: Instance | None, given: argparse.Namespace,
    because: list[str], missing: list[str],
) -> None:  # fmt: skip
    """Say from which speed on CPU hosts are cheaper than the run's, and whether they reach it."""
    other = instance(given.against)
    if on is None or not on.price or not other.price or not given.batch_size:
        missing.append("whether CPU hosts are cheaper: give --instance, with its price, and --batch-size")
        return
    rate = run.steps_per_second * given.batch_size * run.size / len(run.hosts)
    even = rate * other.price / on.price
    text = (
        f"A host does {rate:,.4g} samples/s for ${on.price:g} an hour, its GPUs in use for {used:.0f}%. "
        f"{other.name} at ${other.price:g} is cheaper if it does more than {even:,.4g} samples/s"
    )
    if given.bench is None:
        how = "`ringdance bench train --output FILE` there; then --from FILE"
        missing.append(f"what {other.name} does: {how}")
        because.append(f"{text}.")
        return
    load = from_bench(given.bench)
    there = predict(load, other, Options().per_host(load, other), Options()).samples_per_second
    verdict = "CPU hosts are cheaper" if there > even else "they are not"
    because.append(f"{text}. By {given.bench} it does {there:,.4g}: {verdict}.")


def _learning_rate(batch: int) -> str:
    """Say how far to scale the learning rate when the batch of all ranks doubles."""
    curve = curves()["resnet50"]
    now, more = curve.at(batch), curve.at(2 * batch)
    text = f"Twice the ranks make a batch of {2 * batch:,} of {batch:,}"
    if now is None or more is None:
        return (
            f"{text}, beyond {curve.points[-1][0]:,}, where MLPerf's reference points of ResNet-50 end: give "
            "a rank fewer samples, or see on a short run whether it still converges."
        )
    return (
        f"{text}. In full the learning rate would double; by MLPerf's reference points of ResNet-50 it grows "
        f"{more[1] / now[1]:.2f} times, with {more[2]:.2g} epochs of warm-up, not {now[2]:.2g}, and "
        f"{more[0]:.3g} epochs instead of {now[0]:.3g}: of the speed won, {now[0] / more[0]:.0%} is time won."
    )
