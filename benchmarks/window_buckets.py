"""Would gradients in the shared-memory window be faster? Training steps on two CPU ranks.

What: the module's ``DistributedOptimizer`` copies the data that other ranks reduce into the window. It is
compared with a sketch of the alternative: each gradient is a view of a flat bucket in the window, as with
DDP's ``gradient_as_bucket_view``. Each rank reduces its part of all buckets in place and reads the rest back,
so that nothing is copied in. However, torch must then clear the bucket before each backward pass and add to
it, while it otherwise hands over the tensor that it has just computed. The exchange of buckets of the same
sizes is also measured on its own. The sketch omits everything else that an exchange needs, such as agreement,
names and errors.

Why: it shows whether such buckets are worth a second code path. "x module" is the speed as a multiple of the
module's speed.

How to read: as in ``training_step.py``, which has the same models. Both must train the same weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from common import Report, alternate, ensure_ranks, modules, parser, ratio, run_rank, timed_block
from training_step import LEARNING_RATE, NONE, WORKLOADS, Workload, block, data, stepper, steps_in_block

VIEWS = "views of the window"
CHUNK = 48 << 10  # elements that a rank reduces at a time: they stay in its cache
LINE = 16  # elements between the parts of a bucket


class WindowBuckets:
    """The flat buckets of all ranks on a host. This rank's gradients are views of its own bucket."""

    def __init__(self, job: Any, sizes: Sequence[int]) -> None:
        import numpy as np

        self.rank, self.size = job.rank, job.size
        self.length = sum(-(-size // LINE) * LINE for size in sizes)
        nbytes = (4096 + 4 * self.length) * self.size
        shared = job.mpi.Win.Allocate_shared(nbytes if self.rank == 0 else 0, 1, comm=job.host)
        job._windows.append(shared)
        memory = np.frombuffer(shared.Shared_query(0)[0], np.uint8)
        if self.rank == 0:
            memory[:] = 0
        job.barrier()
        self.counters = memory[: 4096 * self.size].view(np.int64).reshape(self.size, -1)[:, 0]
        rows = memory[4096 * self.size :].view(np.float32).reshape(self.size, self.length)
        self.buckets, self.own = list(rows), rows[self.rank]
        self.turn = 0
        part = self.length // self.size
        self.bounds = [part * rank for rank in range(self.size)] + [self.length]
        job.barrier()

    def meet(self) -> None:
        """Wait for the other ranks."""
        self.turn += 1
        self.counters[self.rank] = self.turn
        while min(self.counters) < self.turn:
            os.sched_yield()

    def average(self) -> None:
        """Average the buckets of all ranks. Every bucket receives the result."""
        import numpy as np

        factor = np.float32(1 / self.size)
        self.meet()
        first, last = self.bounds[self.rank], self.bounds[self.rank + 1]
        for start in range(first, last, CHUNK):
            stop = min(last, start + CHUNK)
            total = self.own[start:stop]
            for rank, bucket in enumerate(self.buckets):
                if rank != self.rank:
                    total += bucket[start:stop]
            total *= factor
        self.meet()
        for rank, bucket in enumerate(self.buckets):
            if rank != self.rank:
                start, stop = self.bounds[rank], self.bounds[rank + 1]
                self.own[start:stop] = bucket[start:stop]
        self.meet()  # no rank may write before all have read


def with_views(job: Any, model: Any, batches: list[tuple[Any, Any]]) -> Callable[[int], None]:
    """Return a function that runs training steps with gradients in the window."""
    import torch

    parameters = list(model.parameters())
    window = WindowBuckets(job, [weight.numel() for weight in parameters])
    flat, at = torch.from_numpy(window.own), 0
    for weight in parameters:
        weight.grad = flat[at : at + weight.numel()].view(weight.shape)
        at += -(-weight.numel() // LINE) * LINE
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    return stepper(model, Averaging(window, flat, optimizer), batches)


class Averaging:
    """An optimizer whose gradients are views of a bucket."""

    def __init__(self, window: WindowBuckets, flat: Any, optimizer: Any) -> None:
        self.window, self.optimizer = window, optimizer
        self.zero_grad = flat.zero_

    def step(self) -> None:
        """Average the gradients and run a step."""
        self.window.average()
        self.optimizer.step()


def measure(job: Any, report: Report, workload: Workload, seconds: float) -> None:
    """Measure the steps of a model, and its exchange on its own."""
    import numpy as np
    import torch
    from torch.nn.utils import parameters_to_vector

    torch.manual_seed(0)
    first, batches = workload.build(), data(job, workload)
    train: dict[str, Any] = {}
    models = {name: copy.deepcopy(first) for name in (*job.modules, VIEWS, NONE)}
    for name, module in job.modules.items():
        sgd = torch.optim.SGD(models[name].parameters(), lr=LEARNING_RATE)
        optimizer = module.DistributedOptimizer(sgd, models[name].named_parameters())
        train[name] = stepper(models[name], optimizer, batches)
    train[VIEWS] = with_views(job, models[VIEWS], batches)
    train[NONE] = stepper(models[NONE], torch.optim.SGD(models[NONE].parameters(), lr=LEARNING_RATE), batches)
    for steps in train.values():
        job.barrier()
        steps(20)
    weights = {name: parameters_to_vector(models[name].parameters()).detach() for name in train}
    for name in job.modules:
        torch.testing.assert_close(weights[VIEWS], weights[name], rtol=1e-4, atol=1e-6)
    count = steps_in_block(job, train[NONE])
    table(report, f"step of {workload.name}", alternate(
        job, {name: block(steps, count) for name, steps in train.items()}, seconds), job)  # fmt: skip
    sizes = [weight.numel() for weight in first.parameters()]
    window = WindowBuckets(job, sizes)
    arrays = [np.ones(size, np.float32) for size in sizes]
    calls: dict[str, Callable[[], object]] = {VIEWS: window.average}
    for name in job.modules:
        calls[name] = exchange_of(job.modules[name], [torch.from_numpy(array) for array in arrays])
    turns = {name: timed_block(call, 5) for name, call in calls.items()}
    table(report, f"exchange of {workload.name}", alternate(job, turns, seconds / 3), job)


def exchange_of(module: Any, tensors: list[Any]) -> Callable[[], object]:
    """Return the exchange of all gradients by a module, in place."""
    return lambda: module.grouped_allreduce_(tensors, name=f"gradients.{len(tensors)}")


def table(report: Report, group: str, samples: dict[str, list[float]], job: Any) -> None:
    """Print medians, and speeds as multiples of the first module's speed."""
    summaries = report.add(group, "s", samples)
    module = next(iter(job.modules))
    rows = []
    for name, summary in summaries.items():
        speed = summaries[module].median / summary.median
        report.figure(group, f"speed {name} / {module}", speed)
        rows.append([name, f"{summary.median * 1e3:.3f}", f"{summary.p10 * 1e3:.3f}",
                     f"{summary.p90 * 1e3:.3f}", ratio(speed)])  # fmt: skip
    report.say()
    report.table((group, "median ms", "p10", "p90", "x module"), rows)


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "window_buckets.py", seconds=20)
    arguments = options.parse_args()
    ensure_ranks(arguments)

    def run(job: Any) -> None:
        report = Report("gradients in the window", job)
        report.opening()
        for workload in WORKLOADS.values():
            measure(job, report, workload, arguments.seconds)
        report.write(arguments.json)

    run_rank(run, modules(arguments))


if __name__ == "__main__":
    main()
