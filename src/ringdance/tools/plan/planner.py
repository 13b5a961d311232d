"""Predict the speed, duration and cost of a training run on other machines."""

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
from ringdance.submit.instances import Instance
from ringdance.tools.plan.models import FORWARD, Curve, KnownModel
from ringdance.tools.plan.simulator import Machine, expected_largest, simulate
from ringdance.tools.report.metrics import read_run

RANK_SPREAD, HOST_SPREAD = 0.04, 0.1
"""Standard deviations of step times on GPUs, as shares of the step time. Fitted to published runs.

See docs/explanation/plan.md.

``RANK_SPREAD`` applies to each rank independently. It is caused by kernels and the program that launches
them. ``HOST_SPREAD`` applies to a host as a whole: its ranks deviate together, because they share the disk,
cores and memory used for reading input. A single host does not wait for other hosts, and runs on synthetic
input do not have this deviation.
"""
TCP_SHARE = 0.94
"""Share of the network bandwidth that remains after Ethernet, IP and TCP headers (1,500-byte packets)."""
NCCL_SHARE = 0.8
"""Share of the network bandwidth that NCCL's all-reduce reaches. Fitted to published runs."""
NCCL_ROUND = 1e-3
"""Seconds per negotiation round between ranks with GPUs."""
PCI_EXPRESS = 10.0
"""Bandwidth in GB/s between the GPUs of a machine without NVLink."""
_LONGEST = 1e6  # maximum duration of a step in seconds
_PARTS = 24  # assumed number of gradients in a run, which its metrics do not include
_MOST_WAITING = 0.99  # upper limit, because metrics sampled within a step may show only waiting


@dataclass(frozen=True)
class Workload:
    """The measured or published properties of a training step.

    Attributes:
        model: Name of the model.
        batch: Samples per rank and step.
        compute: Seconds per step on one rank, without exchanges.
        gradients: Size of each gradient in bytes, and seconds from the start of the step until it is ready.
            Sorted by these times.
        spread: Standard deviation of a rank's step time, in seconds.
        ranks: Number of ranks in the measurement.
        cores: Number of cores on which a rank computes, or 0 if it uses a GPU.
        source: Sentence that says where these values come from.
        others: Maximum share of a host's cores that other programs used during the measurement.
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
        """Return a copy of this step in which the step and its gradients take ``factor`` times as long."""
        gradients = tuple((size, ready * factor) for size, ready in self.gradients)
        return replace(self, compute=self.compute * factor, gradients=gradients, spread=self.spread * factor)


@dataclass(frozen=True)
class PlanOptions:
    """A plan's assumptions, except those about the training step and the machine type.

    Attributes:
        ranks_per_host: Ranks per host. If 0, one rank per GPU, or as many ranks as the cores allow.
        wire: Wire dtype of the gradients.
        samples: Samples per epoch, or 0 if unknown.
        epochs: Number of epochs to train, or 0 if ``curve`` determines it.
        curve: Convergence curve that determines the number of epochs, or None if ``epochs`` applies.
        host_spread: Standard deviation of a host's step time, as a share of the step time. All ranks on a
            host deviate together.
    """

    ranks_per_host: int = 0
    wire: str = "float32"
    samples: int = 0
    epochs: float = 0.0
    curve: Curve | None = None
    host_spread: float = 0.0

    def per_host(self, load: Workload, on: Instance) -> int:
        """Return the number of ranks per machine. Raises LaunchError if this exceeds the number of GPUs."""
        if not load.cores and 0 < on.gpus < self.ranks_per_host:
            raise LaunchError(
                f"--ranks-per-host {self.ranks_per_host}: {on.name} has {on.gpus} GPUs, and each rank needs "
                f"one. Use at most {on.gpus}. For more ranks, add machines with --np."
            )
        return self.ranks_per_host or on.gpus or max(1, int(on.cores / max(load.cores, 1e-9)))


@dataclass(frozen=True)
class Row:
    """The prediction for one rank count. Costs are in dollars. Unknown values are None.

    Attributes:
        efficiency: Speed per rank, relative to the speed of a single rank.
        host_efficiency: Speed per rank, relative to the speed per rank on one full host.
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
    model: KnownModel, rate: float, batch: int, on: Instance, options: PlanOptions, of: int = 1
) -> Workload:
    """Derive the training step of a known model from a published rate.

    Args:
        model: Model to train.
        rate: Total samples per second on ``of`` ranks.
        batch: Samples per rank and step.
        on: Machine type.
        options: Options of the plan. Only the ranks per host and the wire dtype are used.
        of: Number of ranks that reached this rate together.
    """
    seconds = batch * of / rate
    source = f"{model.name}: {rate:,.5g} samples/s on {of} rank{'s' * (of > 1)}, batch {batch}, as specified."
    cores = 0.0 if on.gpus else float(on.cores)
    gradients = tuple(model.gradients(seconds))
    load = Workload(model.name, batch, seconds, gradients, RANK_SPREAD * seconds, of, cores, source)
    return reached(load, seconds, on, options)


def reached(load: Workload, seconds: float, on: Instance, options: PlanOptions) -> Workload:
    """Scale a training step so that its predicted duration on ``load.ranks`` ranks is ``seconds``.

    ``seconds`` includes exchanges and the time that ranks wait for each other. The returned step includes
    neither.

    Raises:
        LaunchError: The exchanges alone take longer than ``seconds``.
    """
    load = load.slower(seconds / load.compute)
    for _ in range(8):
        prediction = predict(load, on, load.ranks, options)
        factor = seconds / prediction.step_seconds
        if abs(factor - 1) < 1e-4 or prediction.exposed_seconds >= seconds:
            break
        load = load.slower(factor)
    if abs(factor - 1) < 0.02:  # predictions may differ by a negotiation round
        return load
    raise LaunchError(
        f"{load.batch * load.ranks / seconds:,.5g} samples/s on {load.ranks} ranks correspond to "
        f"{seconds:.3g} s per step, but on {on.name} the exchanges alone take "
        f"{prediction.exposed_seconds:.3g} s. Pass the rate on fewer ranks, or the wire dtype (--wire) or "
        "bandwidth (--gbits) with which it was measured"
    )


def from_bench(path: Path) -> Workload:
    """Read a training step, without exchanges, from the measurements of ``ringdance bench train``.

    A single rank on a host computes faster than ranks that share memory, caches and power with others.
    Therefore, this function uses the measurement with the most ranks per host for which there were enough
    cores.

    Raises:
        LaunchError: The file was not written by ``ringdance bench train``, or lacks values that a plan needs.
    """
    try:
        content = json.loads(read_regular(path))
        row = min(content["sizes"], key=_preference)
        ranks, times = row["ranks"], row["step_seconds"]
        compute = typed(times, "alone", float)
        gradients = [(typed(item, "bytes", int), typed(item, "seconds", float)) for item in row["gradients"]]
        single = typed({"single_steps": row.get("single_steps") or []}, "single_steps", list[float])
        gpus, cores = bool(row.get("gpus")), typed(row, "cores", int)
        others = max(float(size.get("others", 0)) for size in content["sizes"])
        each = row.get("threads") or cores / max(1, row.get("ranks_per_host", ranks))
        batch, model = typed(content, "batch", int), typed(content, "model", str)
        possible = all(0 <= size < 1 << 40 and ready >= 0 for size, ready in gradients)
        if not (possible and compute < _LONGEST and batch > 0 and each > 0):
            raise ValueError("a number is out of range")
    except NO_FORMAT as error:
        raise LaunchError(
            f"{path} is not a measurement from `ringdance bench train --output FILE` "
            f"({type(error).__name__}: {error}). It may be truncated or from another version. Measure again."
        ) from None
    if not gradients or compute <= 0:
        raise LaunchError(f"{path} contains no gradients for the run on {ranks} ranks. Measure again.")
    deviation = spread(single) if len(single) > 2 else 0.0
    source = (
        f"{path.name}: {model}, batch {batch}, measured on {ranks} rank{'s' * (ranks > 1)}: "
        f"{compute * 1e3:.4g} ms per step without exchanges."
    )
    gradients = [(size, min(ready, compute)) for size, ready in sorted(gradients, key=lambda item: item[1])]
    cores = 0.0 if gpus else float(each)
    return Workload(model, batch, compute, tuple(gradients), deviation, ranks, cores, source, others)


def from_run(directory: Path, batch: int) -> Workload:
    """Derive the training step from the metrics that ``ringdance run --output-filename`` wrote.

    Metrics include only the total size of the gradients. The gradients are assumed to have equal sizes and to
    become ready at regular intervals over the last two thirds of the step.

    Args:
        directory: Directory that contains the metrics of the run.
        batch: Samples per rank and step.

    Raises:
        LaunchError: The metrics are missing, or do not contain any steps.
    """
    run = read_run(directory)
    last, per_host = run.slowest.rows[-1], max(1, run.size // len(run.hosts))
    step = 1 / run.steps_per_second
    compute = step * (1 - min(_MOST_WAITING, run.waiting.communication))
    size = int(last["bytes"] / last["steps"]) // _PARTS
    if not size:
        raise LaunchError(
            f"{directory} contains no gradient exchanges. A plan needs a run on at least two ranks."
        )
    shares = (FORWARD + (1 - FORWARD) * part / _PARTS for part in range(1, _PARTS + 1))
    gradients = [(size, compute * share) for share in shares]
    deviation = max(0.0, run.waiting.skew) * step / expected_largest(max(2, run.size))
    cores = 0.0 if run.gpu is not None else (run.mean("host_cores") or per_host) / per_host
    source = (
        f"{directory}: {run.size} rank{'s' * (run.size > 1)}, {step * 1e3:.4g} ms per step, of which even "
        f"the slowest rank waited {run.waiting.communication:.0%} for exchanges."
    )
    others, name = max(run.taken(host) for host in run.hosts), f"run {directory}"
    return Workload(name, batch, compute, tuple(gradients), deviation, run.size, cores, source, others)


def _preference(row: dict[str, Any]) -> tuple[bool, int, int]:
    """Return the key by which ``from_bench`` chooses a measurement. The smallest key is preferred."""
    ranks, threads = typed(row, "ranks", int), row.get("threads") or 1
    each = row.get("ranks_per_host") or ranks
    return not row.get("gpus") and each * threads > typed(row, "cores", int), -each, ranks


def machine(load: Workload, on: Instance, per_host: int) -> Machine:
    """Return the simulated machine on which the exchanges of a training step run.

    Args:
        load: The training step.
        on: The machine type.
        per_host: Ranks per machine.
    """
    bandwidth = on.gbits / 8 * 1e9
    if load.cores:
        return Machine(bandwidth * TCP_SHARE, ranks_per_core=max(1.0, per_host / on.cores))
    bandwidth *= NCCL_SHARE
    return Machine(
        bandwidth if on.rdma else min(bandwidth * TCP_SHARE, on.tcp_gbits / 8 * 1e9),
        link_bandwidth=(on.nvlink or PCI_EXPRESS) * 1e9, message_seconds=0.0, round_seconds=NCCL_ROUND,
    )  # fmt: skip


def predict(load: Workload, on: Instance, ranks: int, options: PlanOptions) -> Row:
    """Predict a training run on ``ranks`` ranks, rounded up to whole machines if it needs more than one.

    All ranks wait for the slowest rank, so the step is simulated at the pace of the slowest rank.
    """
    per_host = min(ranks, options.per_host(load, on))
    hosts = -(-ranks // per_host)
    size = hosts * per_host
    base = machine(load, on, per_host)
    skew = load.spread * expected_largest(size) + options.host_spread * load.compute * expected_largest(hosts)
    busy = max(1.0, load.cores * per_host / on.cores)  # ranks share the cores
    slow = load.slower((load.compute + skew) / load.compute * busy)
    if load.cores and load.cores * per_host >= on.cores:  # all cores busy: exchanges follow the backward pass
        slow = replace(slow, gradients=tuple((size, slow.compute) for size, _ in slow.gradients))
    step = simulate(base, hosts, per_host, slow.gradients, slow.compute, wire_dtype=options.wire)
    batch, seconds = load.batch * size, step.seconds
    rate = batch / seconds
    epochs = options.curve.epochs(batch) if options.curve else options.epochs or None
    hours = options.samples * epochs / rate / 3600 if epochs is not None and options.samples else None
    money = hours * hosts * on.price if hours is not None and on.price is not None else None
    exposed = seconds - slow.compute
    return Row(size, hosts, rate, load.compute / seconds, seconds, exposed, skew, batch, epochs, hours, money)


def choose(
    row_of: Callable[[int], Row], most: int, deadline: float = 0.0, budget: float = 0.0
) -> tuple[Row | None, dict[int, Row]]:
    """Find the smallest number of hosts that meets a deadline, or the number that is fastest within a budget.

    Args:
        row_of: Predicts the run on a given number of hosts.
        most: Maximum number of hosts.
        deadline: Deadline in hours.
        budget: Budget in dollars.

    Returns:
        The best prediction, or None if nothing meets the limit, and all predictions by number of hosts.
    """
    rows: dict[int, Row] = {}

    def fits(hosts: int) -> bool:
        if hosts not in rows:
            rows[hosts] = row_of(hosts)
        hours, money = rows[hosts].hours, rows[hosts].money
        if deadline:
            return hours is not None and hours <= deadline
        return money is not None and money <= budget

    powers = [2**power for power in range(most.bit_length())]
    grid = sorted({hosts for power in powers for hosts in (power, 3 * power // 2) if hosts <= most})
    fitting = (hosts for hosts in grid if fits(hosts))
    good = list(islice(fitting, 1) if deadline else fitting)
    if not good:
        return None, rows
    if deadline:  # use as few hosts as possible, because more hosts cost more
        high, low = good[0], max((hosts for hosts in grid if hosts < good[0]), default=good[0])
    else:
        high, low = good[-1], min((hosts for hosts in grid if hosts > good[-1]), default=good[-1])
    while abs(high - low) > 1:
        middle = (high + low) // 2
        high, low = (middle, low) if fits(middle) else (high, middle)
    kept = [row for hosts, row in rows.items() if fits(hosts)]
    return min(kept, key=lambda row: row.hosts if deadline else row.hours or 0.0), rows
