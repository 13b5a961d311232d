"""Training steps per second: a multilayer perceptron and a small convolutional net with plain SGD.

What: the module's ``DistributedOptimizer`` in typical use (broadcast, wrap, backward, step), torch's
DistributedDataParallel over gloo and over the backend "ringdance", and no communication at all. The
perceptron is 784-512-512-10 with batch 64 on each rank (0.67 M parameters, steps of a few ms: the exchange
dominates). The net has three convolutions on 3x32x32 and batch 32. As usual, most of its 8.5 M parameters
(34 MB) are in the first dense layer (steps of about 100 ms on one core: computation dominates). All start
from the same weights. Before measuring, module and DDP run the same steps on the same data, and their weights
must agree within 1e-5 on all ranks.

Why: this is the speed that users get. "of none" is the speed as a share of the speed without communication,
"x DDP" as a multiple of DDP's speed. Larger is better for both.

How to read: blocks of steps alternate. A block's time is the slowest rank's time. With as many ranks as
cores, each rank computes with one thread (OMP_NUM_THREADS takes precedence).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import Report, alternate, ensure_ranks, modules, parser, ratio, run_rank

NONE, DDP, BACKEND = "no communication", "torch DDP, gloo", "torch DDP, ringdance"
LEARNING_RATE = 0.01
CHECKED_STEPS = 10
TOLERANCE = 1e-5
BATCHES = 8
BLOCK_SECONDS = 0.2


@dataclass(frozen=True)
class Workload:
    """A model created by ``build``, the shape of one sample, and the samples per rank (``batch``)."""

    name: str
    build: Callable[[], Any]
    sample: tuple[int, ...]
    batch: int


def perceptron() -> Any:
    """Return the 784-512-512-10 perceptron."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def small_net() -> Any:
    """Return the net of three convolutions for 3x32x32 images and 10 classes."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip


WORKLOADS = {
    "mlp": Workload("MLP 784-512-512-10, batch 64", perceptron, (784,), 64),
    "conv": Workload("conv net 3x32x32, batch 32", small_net, (3, 32, 32), 32),
}


def data(job: Any, workload: Workload) -> list[tuple[Any, Any]]:
    """Return this rank's batches. They differ between ranks and are the same for all contestants."""
    import torch

    generator = torch.Generator().manual_seed(1000 + job.rank)
    return [
        (
            torch.randn(workload.batch, *workload.sample, generator=generator),
            torch.randint(0, 10, (workload.batch,), generator=generator),
        )
        for _ in range(BATCHES)
    ]


def stepper(model: Any, optimizer: Any, batches: list[tuple[Any, Any]]) -> Callable[[int], None]:
    """Return a function that runs ``count`` training steps and cycles through the batches."""
    from torch.nn.functional import cross_entropy

    place = 0

    def steps(count: int) -> None:
        nonlocal place
        for _ in range(count):
            samples, labels = batches[place % len(batches)]
            place += 1
            optimizer.zero_grad()
            loss: Any = cross_entropy(model(samples), labels)
            loss.backward()
            optimizer.step()

    return steps


def trainers(job: Any, workload: Workload) -> dict[str, tuple[Any, Callable[[int], None]]]:
    """Return each contestant's model, with the same initial weights, and its steps."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ringdance.training.torch_entry_point import register

    register()
    torch.manual_seed(0)
    first = workload.build()
    batches = data(job, workload)
    result: dict[str, tuple[Any, Callable[[int], None]]] = {}
    for name, module in job.modules.items():
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        module.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = module.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        result[name] = model, stepper(model, optimizer, batches)
    for name, group in ((DDP, None), (BACKEND, torch.distributed.new_group(backend="ringdance"))):
        model = copy.deepcopy(first)
        wrapped = DistributedDataParallel(model, process_group=group)
        result[name] = model, stepper(wrapped, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), batches)
    model = copy.deepcopy(first)
    result[NONE] = model, stepper(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), batches)
    return result


def check(job: Any, found: dict[str, tuple[Any, Callable[[int], None]]]) -> dict[str, float]:
    """Run some steps with each contestant. Returns each module's largest difference from DDP's weights.

    Raises:
        RuntimeError: A module's weights differ from DDP's, or between ranks, by more than ``TOLERANCE``.
    """
    from torch.nn.utils import parameters_to_vector

    weights = {}
    for name, (model, steps) in found.items():
        job.barrier()
        steps(CHECKED_STEPS)
        weights[name] = parameters_to_vector(model.parameters()).detach().clone()
    differences = {}
    for name in (*job.modules, BACKEND):
        differences[name] = float((weights[name] - weights[DDP]).abs().max())
        between = max(abs(weights[name].numpy() - job.comm.bcast(weights[name].numpy())))
        worst = max(job.gather([max(differences[name], float(between))]))[0]
        if worst > TOLERANCE:
            raise RuntimeError(
                f"{name}: after {CHECKED_STEPS} steps, weights differ by {worst:.3g} (from DDP's: "
                f"{differences[name]:.3g}, from rank 0's: {between:.3g}). At most {TOLERANCE} is expected"
            )
    return differences


def block(steps: Callable[[int], None], count: int) -> Callable[[], list[float]]:
    """Return a turn with ``count`` steps. Its sample is the seconds per step."""

    def turn() -> list[float]:
        start = time.perf_counter()
        steps(count)
        return [(time.perf_counter() - start) / count]

    return turn


def steps_in_block(job: Any, steps: Callable[[int], None]) -> int:
    """Return how many steps without communication take about ``BLOCK_SECONDS``. Equal on all ranks."""
    start = time.perf_counter()
    steps(3)
    single = (time.perf_counter() - start) / 3
    return int(job.comm.bcast(max(2, round(BLOCK_SECONDS / single))))


def measure_workload(job: Any, report: Report, workload: Workload, seconds: float) -> None:
    """Check, measure and print one model."""
    trained = trainers(job, workload)
    differences = check(job, trained)
    count = steps_in_block(job, trained[NONE][1])
    samples = alternate(job, {name: block(steps, count) for name, (_, steps) in trained.items()}, seconds)
    summaries = report.add(workload.name, "s/step", samples)
    rows = []
    for name, summary in summaries.items():
        row = [name, f"{summary.median * 1e3:.2f}", f"{summary.p10 * 1e3:.2f}", f"{summary.p90 * 1e3:.2f}"]
        row += [f"{1 / summary.median:.1f}", f"{summary.count} x {count}"]
        for peer in (NONE, DDP):
            value = summaries[peer].median / summary.median
            row.append(ratio(report.figure(workload.name, f"speed {name} / {peer}", value)))
        rows.append(row)
    report.say()
    header = (workload.name, "median ms", "p10", "p90", "steps/s", "steps", "of none", "x DDP")
    report.table(header, rows)
    for name, difference in differences.items():
        report.figure(workload.name, f"weights of {name}, difference from DDP", difference)
        report.say(f"weights of {name} and of DDP after {CHECKED_STEPS} steps differ by {difference:.2g}")


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "training_step.py", seconds=30)
    options.add_argument(
        "--model", choices=WORKLOADS, nargs="+", default=list(WORKLOADS), help="models to train"
    )
    arguments = options.parse_args()
    ensure_ranks(arguments)

    def measure(job: Any) -> None:
        job.gloo()
        report = Report("training steps", job)
        report.opening()
        for name in arguments.model:
            measure_workload(job, report, WORKLOADS[name], arguments.seconds)
        report.write(arguments.json)

    run_rank(measure, modules(arguments))


if __name__ == "__main__":
    main()
