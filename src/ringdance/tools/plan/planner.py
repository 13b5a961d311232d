"""Predict how fast a training is on other machines, how long it takes, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ringdance.core.reports.judging import spread
from ringdance.errors import LaunchError
from ringdance.host.files import NO_FORMAT, read_regular, typed
from ringdance.settings import Settings
from ringdance.submit.instances import Instance
from ringdance.tools.plan.models import FORWARD, Curve, Model
from ringdance.tools.plan.simulator import Machine, expected_largest, simulate
from ringdance.tools.report.figures import read_run

RANK_SPREAD, HOST_SPREAD = 0.04, 0.1
"""Standard deviations, as shares of a step on GPUs; fitted to published runs, see docs/howto/troubleshooting/plan.md.

The first is a rank's, of its kernels and of the program that launches them, independent of all others. The
second is a host's: its ranks share the disk, the cores and the memory that input from files goes through, so
they deviate together. One host alone does not wait for that, and runs on synthetic input do not have it.
"""
TCP_SHARE = 0.94
"""What Ethernet, IP and TCP headers leave of a network's bandwidth, at packets of 1,500 bytes."""
NCCL_SHARE = 0.8
"""What NCCL's all-reduce gets of a network's bandwidth; fitted, see docs/howto/troubleshooting/plan.md."""
NCCL_ROUND = 1e-3
"""Seconds for each round of agreement of ranks with GPUs."""
PCI_EXPRESS = 10.0
"""GB/s between GPUs of a machine without NVLink."""
_LONGEST = 1e6  # seconds of a step
_PARTS = 24  # gradients, in place of those of a run
_MOST_WAITING = 0.99  # share of a step: samples are taken in mid step, and may have nothing else


@dataclass(frozen=True)
class Workload:
    """A training step, as measured or published.

    Attributes:
        model: its name.
        batch: samples of a rank and step.
        compute: seconds of a step of one rank without exchanges.
        gradients: bytes, and seconds after the step's begin at which it is ready, in that order.
        spread: standard deviation of a rank's step, in seconds.
        ranks: that took this step together.
        cores: that a rank computes on; 0 where it has a GPU.
        source: where this comes from, as a sentence.
        others: share of a host's cores that other programs used during the measurement, of any size.
    """

    model: str
    batch: int
    compute: float
    gradients: tuple[tuple[int, float], ...]
    spread: float
    ranks: int
    cores: float
    source: str
    others: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.gradients)

    def slower(self, factor: float) -> Workload:
        """Return the same step when all of it takes so many times as long."""
        gradients = tuple((size, ready * factor) for size, ready in self.gradients)
        return replace(self, compute=self.compute * factor, gradients=gradients, spread=self.spread * factor)


@dataclass(frozen=True)
class Options:
    """What a plan assumes beside the step and the machine.

    Attributes:
        ranks_per_host: 0: one for each GPU, or as many as the cores are enough for.
        wire: what gradients are sent as.
        samples: of an epoch; 0 if not known.
        epochs: to train; 0 if a curve says so.
        curve: epochs by batch.
        host_spread: standard deviation of a host's step, as a share: all its ranks deviate together.
    """

    ranks_per_host: int = 0
    wire: str = "float32"
    samples: int = 0
    epochs: float = 0.0
    curve: Curve | None = None
    host_spread: float = 0.0

    def per_host(self, load: Workload, on: Instance) -> int:
        """Return how many ranks a machine has. Raises LaunchError for more than its GPUs."""
        if not load.cores and 0 < on.gpus < self.ranks_per_host:
            raise LaunchError(
                f"--ranks-per-host {self.ranks_per_host}: {on.name} has {on.gpus} GPUs, one for each rank. "
                f"Give at most {on.gpus}; more ranks take more machines, --np"
            )
        return self.ranks_per_host or on.gpus or max(1, int(on.cores / max(load.cores, 1e-9)))


@dataclass(frozen=True)
class Row:
    """A prediction; money in dollars. None is what is not known.

    Attributes:
        efficiency: what a rank does, as a share of what it would do alone.
        host_efficiency: the same as a share of what it does on one whole host.
    """

    ranks: int
    hosts: int
    samples_per_second: float
    efficiency: float
    step_seconds: float
    exposed_seconds: float
    skew_seconds: float
    batch: int
    epochs: float | None = None
    hours: float | None = None
    money: float | None = None
    host_efficiency: float | None = None


def from_model(
    model: Model, rate: float, batch: int, on: Instance, options: Options, of: int = 1
) -> Workload:
    """Return the step of a known model by a published rate.

    Args:
        model: what is trained.
        rate: samples per second of `of` ranks together.
        batch: samples of a rank and step.
        on: the machine.
        options: of the plan; ranks of a machine, and what is sent.
        of: number of ranks that reached this rate.
    """
    seconds = batch * of / rate
    source = f"{model.name}: {rate:,.5g} samples/s of {of} rank{'s' * (of > 1)}, batch {batch}, as given."
    cores = 0.0 if on.gpus else float(on.cores)
    gradients = tuple(model.gradients(seconds))
    load = Workload(model.name, batch, seconds, gradients, RANK_SPREAD * seconds, of, cores, source)
    return reached(load, seconds, on, options)


def reached(load: Workload, seconds: float, on: Instance, options: Options) -> Workload:
    """Return the step that takes ``seconds`` when its ranks take it together.

    Their exchanges, and that they wait for one another, are in these seconds, and not in what is returned.

    Raises:
        LaunchError: the exchanges alone take longer.
    """
    load = load.slower(seconds / load.compute)
    for _ in range(8):
        found = predict(load, on, load.ranks, options)
        factor = seconds / found.step_seconds
        if abs(factor - 1) < 1e-4 or found.exposed_seconds >= seconds:
            break
        load = load.slower(factor)
    if abs(factor - 1) < 0.02:  # a round of agreement more or less lets it jump
        return load
    raise LaunchError(
        f"{load.batch * load.ranks / seconds:,.5g} samples/s of {load.ranks} ranks are {seconds:.3g} s a "
        f"step, and on {on.name} its exchanges alone take {found.exposed_seconds:.3g} s. Give the rate of "
        "fewer ranks, what it was sent as (--wire), or the network that it was reached on (--gbits)"
    )


def from_bench(path: Path) -> Workload:
    """Return the step that `ringdance bench train` measured without exchanges, on a host in full use.

    One rank alone on a host computes faster than when others use its memory, its caches and its power; so
    this is the size with the most ranks on a host, as far as there are cores for them.

    Raises:
        LaunchError: the file is not one of its, or lacks what a plan needs.
    """
    try:
        found = json.loads(read_regular(path))
        row = min(found["sizes"], key=_preference)
        ranks, times = row["ranks"], row["step_seconds"]
        compute = float(times.get("alone") or times["ringdance"] * (1 - row.get("exposed_share", 0.0)))
        gradients = [(typed(one, "bytes", int), typed(one, "seconds", float)) for one in row["gradients"]]
        single = typed({"single_steps": row.get("single_steps") or []}, "single_steps", list[float])
        gpus, cores = bool(row.get("gpus")), typed(row, "cores", int)
        others = max(float(size.get("others", 0)) for size in found["sizes"])
        each = row.get("threads") or cores / max(1, row.get("ranks_per_host", ranks))
        batch, model = typed(found, "batch", int), typed(found, "model", str)
        possible = all(0 <= size < 1 << 40 and ready >= 0 for size, ready in gradients)
        if not (possible and compute < _LONGEST and batch > 0 and each > 0):
            raise ValueError("a number that cannot be")
    except NO_FORMAT as error:
        raise LaunchError(
            f"{path} is no measurement of `ringdance bench train --output FILE` ({type(error).__name__}: "
            f"{error}): a file that was cut, or of another version; measure again"
        ) from None
    if not gradients or compute <= 0:
        raise LaunchError(f"{path} has no gradients of the run on {ranks} ranks; measure again")
    deviation = spread(single) if len(single) > 2 else 0.0
    source = (
        f"{path.name}: {model}, batch {batch}, measured on {ranks} rank{'s' * (ranks > 1)}: "
        f"{compute * 1e3:.4g} ms of a step without exchanges."
    )
    gradients = [(size, min(ready, compute)) for size, ready in sorted(gradients, key=lambda one: one[1])]
    cores = 0.0 if gpus else float(each)
    return Workload(model, batch, compute, tuple(gradients), deviation, ranks, cores, source, others)


def from_run(directory: Path, batch: int) -> Workload:
    """Return the step of a run, by what `ringdance run --output-filename` has left.

    Only the sum of its gradients is known: equal ones are taken, over the last two thirds of the step.

    Args:
        directory: with the figures of the run.
        batch: samples of a rank and step.

    Raises:
        LaunchError: there are no figures, or no steps.
    """
    run = read_run(directory)
    last, per_host = run.slowest.rows[-1], max(1, run.size // len(run.hosts))
    step = 1 / run.steps_per_second
    compute = step * (1 - min(_MOST_WAITING, run.communication))
    size = int(last["bytes"] / last["steps"]) // _PARTS
    if not size:
        raise LaunchError(f"{directory} has no gradients: plans need a run on two ranks at least")
    shares = (FORWARD + (1 - FORWARD) * part / _PARTS for part in range(1, _PARTS + 1))
    gradients = [(size, compute * share) for share in shares]
    deviation = max(0.0, run.skew) * step / expected_largest(max(2, run.size))
    cores = 0.0 if run.gpu is not None else (run.mean("host_cores") or per_host) / per_host
    source = (
        f"{directory}: {run.size} rank{'s' * (run.size > 1)}, {step * 1e3:.4g} ms a step, of which even the "
        f"slowest waited {run.communication:.0%} for exchanges."
    )
    others, name = max(run.taken(host) for host in run.hosts), f"run {directory}"
    return Workload(name, batch, compute, tuple(gradients), deviation, run.size, cores, source, others)


def _preference(row: dict[str, Any]) -> tuple[bool, int, int]:
    """Sort the sizes of a measurement: see ``from_bench``."""
    ranks, threads = typed(row, "ranks", int), row.get("threads") or 1
    each = row.get("ranks_per_host") or ranks
    return not row.get("gpus") and each * threads > typed(row, "cores", int), -each, ranks


def machine(load: Workload, on: Instance, per_host: int) -> Machine:
    """Return what the exchanges of a step run on.

    Args:
        load: the step.
        on: the kind of machine.
        per_host: ranks of a machine.
    """
    bandwidth = on.gbits / 8 * 1e9
    if load.cores:
        return Machine(bandwidth * TCP_SHARE, ranks_per_core=max(1.0, per_host / on.cores))
    bandwidth *= NCCL_SHARE
    return Machine(
        bandwidth if on.rdma else min(bandwidth * TCP_SHARE, on.tcp_gbits / 8 * 1e9),
        link_bandwidth=(on.nvlink or PCI_EXPRESS) * 1e9, message_seconds=0.0, round_seconds=NCCL_ROUND,
    )  # fmt: skip


def predict(load: Workload, on: Instance, ranks: int, options: Options) -> Row:
    """Predict a training on `ranks` ranks; on part of a machine, if it has more.

    All ranks wait for the slowest one: the step is replayed as that one takes it.
    """
    per_host = min(ranks, options.per_host(load, on))
    hosts = -(-ranks // per_host)
    size = hosts * per_host
    base = machine(load, on, per_host)
    skew = load.spread * expected_largest(size) + options.host_spread * load.compute * expected_largest(hosts)
    busy = max(1.0, load.cores * per_host / on.cores)  # ranks share the cores
    slow = load.slower((load.compute + skew) / load.compute * busy)
    if load.cores and load.cores * per_host >= on.cores:  # no idle core: the engine exchanges after backward
        slow = replace(slow, gradients=tuple((size, slow.compute) for size, _ in slow.gradients))
    found = simulate(
        base, hosts, per_host, slow.gradients, slow.compute, wire_dtype=options.wire, settings=Settings()
    )
    batch, seconds = load.batch * size, found.seconds
    rate = batch / seconds
    epochs: float | None = options.epochs or None
    if options.curve is not None:
        point = options.curve.at(batch)
        epochs = point[0] if point else None
    hours = options.samples * epochs / rate / 3600 if epochs is not None and options.samples else None
    money = hours * hosts * on.price if hours is not None and on.price is not None else None
    exposed = seconds - slow.compute
    return Row(size, hosts, rate, load.compute / seconds, seconds, exposed, skew, batch, epochs, hours, money)


def choose(
    row_of: Callable[[int], Row], most: int, deadline: float = 0.0, budget: float = 0.0
) -> tuple[Row | None, dict[int, Row]]:
    """Return the fewest hosts that keep a deadline, or the fastest for a budget; all tried.

    Args:
        row_of: the prediction for a number of hosts.
        most: number of hosts to try.
        deadline: hours.
        budget: dollars.
    """
    rows: dict[int, Row] = {}

    def fits(hosts: int) -> bool:
        if hosts not in rows:
            rows[hosts] = row_of(hosts)
        hours, money = rows[hosts].hours, rows[hosts].money
        if deadline:
            return hours is not None and hours <= deadline
        return money is not None and money <= budget

    grid = [hosts for power in range(12) for hosts in (2**power, 3 * 2**power // 2) if hosts <= most]
    grid = sorted(set(grid))
    fitting = (hosts for hosts in grid if fits(hosts))
    good = list(islice(fitting, 1) if deadline else fitting)
    if not good:
        return None, rows
    if deadline:  # more hosts cost more: as few as keep it
        high, low = good[0], max((hosts for hosts in grid if hosts < good[0]), default=good[0])
    else:
        high, low = good[-1], min((hosts for hosts in grid if hosts > good[-1]), default=good[-1])
    while abs(high - low) > 1:
        middle = (high + low) // 2
        high, low = (middle, low) if fits(middle) else (high, middle)
    kept = [row for hosts, row in rows.items() if fits(hosts)]
    if deadline:
        return min(kept, key=lambda row: (row.hosts, row.ranks)), rows
    return min(kept, key=lambda row: row.hours or 0.0), rows
