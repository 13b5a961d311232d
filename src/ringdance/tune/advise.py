"""``ringdance advise``: scale a run up, out, or not at all; by its figures and the planner."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringdance.launch.parser import Parser, as_program, number, positive
from ringdance.observe.figures import Run, read_run
from ringdance.observe.limits import RunLimit, is_full, judge
from ringdance.observe.report import trace_of, uneven_share
from ringdance.tune.catalog import Instance, curves, instance
from ringdance.tune.planner import Options, Row, Workload, predict
from ringdance.tune.simulator import expected_largest

_EPILOG = """\
examples:
  ringdance run -np 4 --output-filename logs python train.py
  ringdance advise logs                                           what to do first
  ringdance advise logs --gbits 25 --batch-size 32                and whether twice the hosts are worth it
  ringdance advise logs --instance p3.16xlarge                    the same, with the network of these hosts

Every sentence names the figure that it rests on. Where a run has none, it says what is missing.
"""
_WORTH = 0.75  # efficiency of additional hosts from which on they are advised
_PARTS = 24  # gradients, in place of those of a run, of which only the sum is known
_MOST_WAITING = 0.99  # share of a step: samples are taken in mid step, and may have nothing else
_TITLES = {
    "not": "Do not scale now.", "up": "Scale up: fill the hosts that there are.",
    "out": "Scale out: more hosts are worth it.",
}  # fmt: skip
_NO_NETWORK = (
    "what more hosts would bring: the run's figures do not have the network between them. Measure it "
    "with `iperf3`, then pass --gbits; or pass --instance"
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
        given: batch_size, gbits and instance of the command line; 0 or None if not given.
    """
    network = instance(given.instance) if given.instance else Instance("", 0, 0.0)
    network = replace(network, gbits=given.gbits or network.gbits)
    because, missing = [*limit.evidence, limit.next_step], list[str]()
    full = limit.bound == "computation" and is_full(run)
    scale = "up" if limit.bound == "computation" and not full else "not"
    if limit.bound == "input":
        missing.append("how fast the step is without its input: `ringdance bench input -- CMD` measures it")
    elif full or limit.bound == "communication":
        if not network.gbits:
            missing.append(_NO_NETWORK)
        elif _is_worth_it(run, network, because) and full:
            scale = "out"
    if scale == "out" and given.batch_size:
        because.append(_learning_rate(given.batch_size * run.size))
    elif scale == "out":
        missing.append("how to scale the learning rate: give --batch-size, the samples of a rank and step")
    return scale, because, missing


def _is_worth_it(run: Run, network: Instance, because: list[str]) -> bool:
    """Return whether twice the hosts are worth their price, and add what the planner says of them."""
    now, half, more = (_predict(run, network, *how) for how in ((1,), (1, "float16"), (2,)))
    gain = more.samples_per_second / now.samples_per_second
    because.append(
        f"At {network.gbits:g} Gbit/s the planner has {now.step_seconds * 1e3:.3g} ms for a step, "
        f"{half.step_seconds * 1e3:.3g} with 16 bits on the wire. Twice the hosts are {gain:.2f} times as "
        f"fast: the additional ones work at {gain - 1:.0%}, and from {_WORTH:.0%} on they are advised."
    )
    return gain - 1 >= _WORTH


def _predict(run: Run, network: Instance, factor: int, wire: str = "float32") -> Row:
    """Return the planner's prediction for so many times the hosts; of gradients a run has only the sum."""
    step, last = 1 / run.steps_per_second, run.slowest.rows[-1]
    compute = step * (1 - min(_MOST_WAITING, run.communication))
    size = int(last["bytes"] / last["steps"]) // _PARTS
    gradients = [(size, compute * (1 / 3 + 2 / 3 * part / _PARTS)) for part in range(1, _PARTS + 1)]
    spread = max(0.0, run.skew) * step / expected_largest(max(2, run.size))
    gpu = run.ranks[0].gpu is not None
    load = Workload("", 1, compute, tuple(gradients), spread, run.size, 0.0 if gpu else 1e-9, "")
    per_host = max(1, run.size // len(run.hosts))
    on = replace(network, cores=int(run.mean("host_cores")) or per_host, gpus=per_host * gpu)
    return predict(load, on, run.size * factor, Options(per_host, wire))


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
