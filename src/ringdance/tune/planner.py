"""Predict how fast a training is on other machines, how long it takes, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError
from ringdance.job_files import NO_FORMAT, read_regular, typed
from ringdance.judging import spread
from ringdance.settings import Settings
from ringdance.tune.catalog import Curve, Instance, Model
from ringdance.tune.simulator import Machine, expected_largest, simulate

TCP_SHARE = 0.94
"""What Ethernet, IP and TCP headers leave of a network's bandwidth, at packets of 1,500 bytes."""
NCCL_SHARE = 0.78
"""What NCCL's all-reduce gets of a network's bandwidth; fitted, see docs/howto/plan.md."""
NCCL_TCP_GBITS = 32.0
"""What NCCL gets over TCP on faster networks, Gbit/s."""
NCCL_ROUND = 1e-3
"""Seconds for each round of agreement of ranks with GPUs."""
PCI_EXPRESS = 10.0
"""GB/s between GPUs of a machine without NVLink."""
_LONGEST = 1e6  # seconds of a step


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
    """

    model: str
    batch: int
    compute: float
    gradients: tuple[tuple[int, float], ...]
    spread: float
    ranks: int
    cores: float
    source: str

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
        crowd: hosts that share the cores of one machine, as simulated ones do.
    """

    ranks_per_host: int = 0
    wire: str = "float32"
    samples: int = 0
    epochs: float = 0.0
    curve: Curve | None = None
    crowd: int = 1

    def per_host(self, load: Workload, on: Instance) -> int:
        """Return how many ranks a machine has."""
        return self.ranks_per_host or on.gpus or max(1, int(on.cores / max(load.cores, 1e-9)))


@dataclass(frozen=True)
class Row:
    """A prediction; money in dollars. None is what is not known."""

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
    load = Workload(
        model.name, batch, seconds, tuple(model.gradients(seconds)), model.spread * seconds, of, cores, source
    )
    for _ in range(4 * (of > 1)):  # what they exchange, and wait for one another, is in their rate
        load = load.slower(seconds / predict(load, on, of, options).step_seconds)
    return load


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
    return Workload(
        model, batch, compute, tuple(gradients), deviation, ranks, 0.0 if gpus else float(each), source
    )


def _preference(row: dict[str, Any]) -> tuple[bool, int, int]:
    """Sort the sizes of a measurement: see ``from_bench``."""
    ranks, threads = typed(row, "ranks", int), row.get("threads") or 1
    each = row.get("ranks_per_host") or ranks
    return not row.get("gpus") and each * threads > typed(row, "cores", int), -each, ranks


def machine(load: Workload, on: Instance, per_host: int, crowd: int = 1) -> Machine:
    """Return what the exchanges of a step run on.

    Args:
        load: the step.
        on: the kind of machine.
        per_host: ranks of a machine.
        crowd: hosts that share the cores of one machine.
    """
    bandwidth = on.gbits / 8 * 1e9
    if load.cores:
        return Machine(bandwidth * TCP_SHARE, ranks_per_core=max(1.0, per_host * crowd / on.cores))
    bandwidth *= NCCL_SHARE
    return Machine(
        bandwidth if on.rdma else min(bandwidth, NCCL_TCP_GBITS / 8 * 1e9),
        link_bandwidth=(on.nvlink or PCI_EXPRESS) * 1e9, message_seconds=0.0, round_seconds=NCCL_ROUND,
    )  # fmt: skip


def predict(load: Workload, on: Instance, ranks: int, options: Options) -> Row:
    """Predict a training on `ranks` ranks; on part of a machine, if it has more.

    All ranks wait for the slowest one: the step is replayed as that one takes it.
    """
    per_host = min(ranks, options.per_host(load, on))
    hosts = -(-ranks // per_host)
    size = hosts * per_host
    base = machine(load, on, per_host, options.crowd)
    skew = load.spread * expected_largest(size)
    busy = max(1.0, load.cores * per_host * options.crowd / on.cores)  # ranks share the cores
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
    good = [hosts for hosts in grid if fits(hosts)]
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
