"""Latency and bandwidth of one blocking all-reduce by size, 4 B to 64 MB.

What: the module's named ``allreduce_`` in place (sum of float32), compared with one raw mpi4py ``Allreduce``
in place, ``torch.distributed.all_reduce`` over gloo, and the sum of two local tensors of the same size (no
communication). From 256 KB, also the memory bound: all ranks copy the tensor through a shared-memory window
and back at the same time, without a sum.

Then a lone 4-byte all-reduce in three situations: called by a second thread while the main thread runs pure
Python; called by the main thread while a second thread runs pure Python; after 50 ms of other work in memory
(cold caches).

Why: small sizes show the cost of a call in the engine, large sizes how well it uses memory. Python's
interpreter lock makes a busy thread the worst case for an engine written in Python.

How to read: blocks of calls of all contestants alternate. A block has 500 calls if they are short, because
the kernel may leave both ranks on one core for some ms after gloo's turn. Median, 10th and 90th percentile
are over all calls on all ranks. "x mpi" is the time as a multiple of raw MPI's time (smaller is better).
"of bound" is the copy bound divided by the time (larger is better).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common import (
    Report,
    Summary,
    alternate,
    ensure_ranks,
    microseconds,
    modules,
    parser,
    pooled,
    ratio,
    run_rank,
    timed_block,
)

SIZES = (4, 256, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
BOUND_FROM = 256 << 10
MPI, GLOO, LOCAL, BOUND = "raw mpi4py", "gloo", "local sum", "copy bound"
WORK_SECONDS = 0.05
HEADER = ("size  contestant", "median us", "p10", "p90", "calls", "GB/s", "x mpi", "x gloo", "of bound")


def label(nbytes: int) -> str:
    """Format a size with its unit."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def calls_in_block(nbytes: int) -> int:
    """Return the number of calls that take about ten milliseconds."""
    return max(1, min(500, (20 << 20) // (nbytes + (40 << 10))))


def calls(job: Any, nbytes: int) -> dict[str, Callable[[], object]]:
    """Return a blocking call for each contestant on one zeroed tensor, after checking its results."""
    import torch
    import torch.distributed as dist
    from peers import copy_through_window

    tensor = torch.empty(nbytes // 4)
    array = tensor.numpy()
    result: dict[str, Callable[[], object]] = {}
    for name, module in job.modules.items():
        result[name] = partial(module.allreduce_, tensor, name=f"benchmark.{nbytes}", op=module.Sum)
    result[MPI] = partial(job.comm.Allreduce, job.mpi.IN_PLACE, array)
    result[GLOO] = partial(dist.all_reduce, tensor)
    for name, call in result.items():
        tensor.fill_(job.rank + 1)
        call()
        if not bool((tensor == job.size * (job.size + 1) / 2).all()):
            raise RuntimeError(f"{name}: wrong sum of {label(nbytes)}")
    result[LOCAL] = partial(tensor.add_, torch.zeros(nbytes // 4))
    if nbytes >= BOUND_FROM:
        result[BOUND] = copy_through_window(job, [array])
    tensor.zero_()  # sums of zeros stay finite forever
    return result


def by_size(job: Any, report: Report, sizes: Sequence[int], seconds: float) -> None:
    """Measure and print all sizes."""
    rows = []
    for nbytes in sizes:
        contestants = {
            name: timed_block(call, calls_in_block(nbytes)) for name, call in calls(job, nbytes).items()
        }
        group = label(nbytes)
        summaries = report.add(group, "s", alternate(job, contestants, seconds, pooled))
        rows += size_rows(report, group, nbytes, summaries)
    report.table(HEADER, rows)


def size_rows(report: Report, group: str, nbytes: int, summaries: dict[str, Summary]) -> list[list[str]]:
    """Return the table's rows for one size, and store the ratios."""
    rows = []
    for name, summary in summaries.items():
        cells = [f"{group:>6}  {name}", *map(microseconds, (summary.median, summary.p10, summary.p90))]
        cells += [str(summary.count), f"{nbytes / summary.median / 1e9:.2f}"]
        if name in (LOCAL, BOUND):
            rows.append([*cells, "", "", ""])
            continue
        for peer in (MPI, GLOO):
            value = report.figure(group, f"{name} / {peer}", summary.median / summaries[peer].median)
            cells.append(ratio(value))
        share = ""
        if BOUND in summaries:
            value = report.figure(group, f"{BOUND} / {name}", summaries[BOUND].median / summary.median)
            share = f"{value:.2f}"
        rows.append([*cells, share])
    return rows


# ---------------------------------------------------------------- a lone small call, disturbed


def spin_until(done: Callable[[], bool]) -> None:
    """Run only bytecode until ``done()``, which is called about every millisecond."""
    total = 0
    while not done():
        for index in range(10_000):
            total += index


def while_main_is_busy(turn: Callable[[], list[float]]) -> list[float]:
    """Run the turn in a second thread while the calling (main) thread runs pure Python."""
    samples: list[float] = []
    worker = threading.Thread(target=lambda: samples.extend(turn()))
    worker.start()
    spin_until(lambda: not worker.is_alive())
    worker.join()
    return samples


def while_other_is_busy(turn: Callable[[], list[float]]) -> list[float]:
    """Run the turn in the calling thread while a second thread runs pure Python."""
    stop = threading.Event()
    other = threading.Thread(target=spin_until, args=(stop.is_set,))
    other.start()
    try:
        return turn()
    finally:
        stop.set()
        other.join()


def after_work(job: Any, call: Callable[[], object], memory: Any) -> list[float]:
    """Time one call after copying in ``memory`` for ``WORK_SECONDS``. Ranks finish copying together."""
    job.agreed(True)
    end = time.perf_counter() + WORK_SECONDS
    half = memory.size // 2
    chunk, at = 4096, 0
    while time.perf_counter() < end:
        memory[at : at + chunk] = memory[half + at : half + at + chunk]
        at = (at + chunk) % (half - chunk)
    start = time.perf_counter()
    call()
    return [time.perf_counter() - start]


def disturbed(job: Any, report: Report, seconds: float) -> None:
    """Measure and print the lone 4-byte call in the three situations."""
    import numpy as np

    memory = np.ones(8 << 20, np.float32)
    chosen = {name: call for name, call in calls(job, 4).items() if name != LOCAL}
    blocks = {name: timed_block(call, 5) for name, call in chosen.items()}
    situations: dict[str, dict[str, Callable[[], Sequence[float]]]] = {
        "main thread busy, second calls": {n: partial(while_main_is_busy, t) for n, t in blocks.items()},
        "second thread busy, main calls": {n: partial(while_other_is_busy, t) for n, t in blocks.items()},
        "after 50 ms of other work": {n: partial(after_work, job, c, memory) for n, c in chosen.items()},
    }
    rows = []
    for group, contestants in situations.items():
        summaries = report.add(group, "s", alternate(job, contestants, seconds, pooled))
        for name, summary in summaries.items():
            times = map(microseconds, (summary.median, summary.p10, summary.p90))
            rows.append([f"{group}: {name}", *times, str(summary.count)])
    report.say()
    report.table(("lone 4 B, situation: contestant", "median us", "p10", "p90", "calls"), rows)


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "allreduce.py", seconds=3)
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 4")
    arguments = options.parse_args()
    if any(size < 4 or size % 4 for size in arguments.sizes):
        options.error("--sizes: use multiples of 4 bytes, at least 4")
    ensure_ranks(arguments)

    def measure(job: Any) -> None:
        job.gloo()
        report = Report("all-reduce by size", job)
        report.opening()
        by_size(job, report, arguments.sizes, arguments.seconds)
        disturbed(job, report, arguments.seconds)
        report.write(arguments.json)

    run_rank(measure, modules(arguments))


if __name__ == "__main__":
    main()
