"""Gradients for some rows of a large table: time and memory, as rows and as a dense table.

What: a table of ``--rows`` x ``--columns`` float32. Each rank has gradients for ``--touched`` rows, drawn at
random with repetitions. They are averaged over the ranks as a sparse gradient: from NumPy, with the method
chosen (auto) or forced; with ``ringdance.torch`` (``DistributedOptimizer``); with ``ringdance.tensorflow`` (a
``tf.function`` with ``DistributedGradientTape``, if TensorFlow is installed); with raw mpi4py (two
Allgatherv, merged by NumPy); and with gloo (``all_reduce`` of a sparse tensor). For comparison, a dense table
of the same size: ``allreduce_``. All results are checked.

Why: the cost of a dense exchange depends on the size of the table, no matter how few rows have gradients. The
cost of rows should depend only on their number.

How to read: contestants alternate. Times are the slowest rank's. "peak" is the extra memory that a call
needs: the growth of the resident size while it runs (Linux), in a separate call for each contestant, on the
rank with the largest. "/ rows" is the peak as a multiple of the bytes of all ranks' rows.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, alternate, ensure_ranks, milliseconds, parser, run_rank, timed

MB = 1 << 20
DENSE, MPI, GLOO = "dense allreduce_", "raw mpi4py", "gloo sparse"
LOOK_SECONDS = 0.0005
HEADER = ("contestant", "median ms", "p10", "p90", "runs", "peak MB", "/ rows")


def resident() -> int:
    """Return this process's resident size in bytes (proc_pid_statm(5)), 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def peak_of(call: Callable[[], object]) -> int:
    """Return the largest growth of the resident size, in bytes, while a call runs."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed earlier must not hide what the call needs
    except AttributeError:
        pass
    before = largest = resident()
    done = threading.Event()

    def look() -> None:
        nonlocal largest
        while not done.is_set():
            largest = max(largest, resident())
            time.sleep(LOOK_SECONDS)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(largest, resident()) - before


class Case:
    """One rank's rows, and the expected average of all ranks' rows.

    Args:
        job: Ranks of this run.
        rows, columns: Size of the table.
        touched: Number of rows for which each rank has gradients.
    """

    def __init__(self, job: Any, rows: int, columns: int, touched: int) -> None:
        self.job = job
        self.rows, self.columns = rows, columns
        keys = [np.random.default_rng(rank).integers(0, rows, touched) for rank in range(job.size)]
        self.keys = keys[job.rank]
        self.values = np.full((touched, columns), job.rank + 1.0, np.float32)
        every = np.concatenate(keys)
        self.used, places = np.unique(every, return_inverse=True)
        weights = np.repeat(np.arange(1.0, job.size + 1), touched)
        self.wanted = (np.bincount(places, weights) / job.size).astype(np.float32)
        self.nbytes = len(every) * (4 * columns + 8)

    def check(self, name: str, keys: Any, values: Any) -> None:
        """Raise RuntimeError unless these are the averages of all ranks' rows."""
        good = np.array_equal(np.asarray(keys), self.used)
        if not good or not np.allclose(np.asarray(values), self.wanted[:, None], rtol=1e-5):
            raise RuntimeError(f"{name}: wrong rows")


def by_route(case: Case, route: str) -> Callable[[], tuple[Any, Any]]:
    """Return a call that averages with ``training.gradients.sparse`` and the setting ``route``."""
    from dataclasses import replace

    from ringdance.training import session
    from ringdance.training.gradients.sparse import Rows, SparseExchange

    engine = session.engine()

    def call() -> tuple[Any, Any]:
        kept, engine.settings = engine.settings, replace(engine.settings, sparse=route)
        try:
            part = Rows(case.keys, case.values, case.rows)
            (rows,) = SparseExchange(engine, [part], [route], name=f"benchmark.{route}", average=True).wait()
        finally:
            engine.settings = kept
        return rows.keys, rows.values

    return call


def by_torch(case: Case) -> Callable[[], tuple[Any, Any]]:
    """Return a call that averages the gradient of an embedding in ``DistributedOptimizer``."""
    import torch

    import ringdance.torch as hvd

    table = torch.nn.Parameter(torch.zeros(1).expand(case.rows, case.columns), requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=0.0), [("table", table)])
    keys, values = torch.from_numpy(case.keys)[None], torch.from_numpy(case.values)

    def call() -> tuple[Any, Any]:
        table.grad = torch.sparse_coo_tensor(keys, values, table.shape, check_invariants=False)
        if optimizer._exchange is not None:
            optimizer._exchange.on_gradient(0)
            optimizer._exchange.on_backward_end()
            optimizer._exchange.on_step_end()
        gradient = table.grad.coalesce()
        return gradient.indices()[0].numpy(), gradient.values().numpy()

    return call


def by_tensorflow(case: Case) -> Callable[[], tuple[Any, Any]]:
    """Return a call that averages the gradient of ``tf.gather`` in a tf.function."""
    import tensorflow as tf

    import ringdance.tensorflow as hvd

    table = tf.Variable(tf.zeros((case.rows, case.columns)))
    keys, values = tf.constant(case.keys), tf.constant(case.values)

    @tf.function
    def step() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, keys) * values)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [table])
        return gradient.indices, gradient.values

    def call() -> tuple[Any, Any]:
        indices, sums = step()
        return indices.numpy(), sums.numpy()

    return call


def by_mpi(case: Case) -> Callable[[], tuple[Any, Any]]:
    """Return a call that gathers keys and values with two Allgatherv and merges them with NumPy."""
    comm, size = case.job.comm, case.job.size

    def call() -> tuple[Any, Any]:
        counts = np.array(comm.allgather(len(case.keys)))
        keys = np.empty(counts.sum(), np.int64)
        values = np.empty((counts.sum(), case.columns), np.float32)
        comm.Allgatherv(case.keys, (keys, counts))
        comm.Allgatherv(case.values, (values, counts * case.columns))
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        return keys[starts], np.add.reduceat(values, starts, axis=0) / np.float32(size)

    return call


def by_gloo(case: Case) -> Callable[[], tuple[Any, Any]]:
    """Return a call that sums a sparse tensor with torch.distributed and divides."""
    import torch
    import torch.distributed as dist

    keys, values = torch.from_numpy(case.keys)[None], torch.from_numpy(case.values)

    def call() -> tuple[Any, Any]:
        tensor = torch.sparse_coo_tensor(
            keys, values, (case.rows, case.columns), check_invariants=False
        ).coalesce()
        dist.all_reduce(tensor)
        summed = tensor.coalesce()
        return summed.indices()[0].numpy(), (summed.values() / case.job.size).numpy()

    return call


def dense(case: Case) -> Callable[[], object]:
    """Return a call that creates a whole table, as for a dense gradient, and averages it in place."""
    import ringdance.numpy as hvd

    def call() -> object:
        table = np.zeros((case.rows, case.columns), np.float32)
        np.add.at(table, case.keys, case.values)
        return hvd.allreduce(table, name="benchmark.dense", out=table)

    return call


def contestants(case: Case) -> dict[str, Callable[[], object]]:
    """Return a call for each contestant, after checking its results."""
    made: dict[str, Callable[[], tuple[Any, Any]]] = {
        "sparse, auto": by_route(case, "auto"), "sparse, as rows": by_route(case, "rows"),
        "sparse, dense": by_route(case, "dense"), "ringdance.torch": by_torch(case),
    }  # fmt: skip
    if importlib.util.find_spec("tensorflow") is not None:
        made["ringdance.tensorflow"] = by_tensorflow(case)
    made[MPI] = by_mpi(case)
    made[GLOO] = by_gloo(case)
    for name, call in made.items():
        case.check(name, *call())
    whole: dict[str, Callable[[], object]] = {**made, DENSE: dense(case)}
    return whole


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "sparse_rows.py", seconds=20)
    options.add_argument("--rows", type=int, default=10_000_000, help="rows of the table (10,000,000)")
    options.add_argument("--columns", type=int, default=16, help="columns of the table (16)")
    options.add_argument("--touched", type=int, default=5000, help="rows with gradients per rank (5,000)")
    arguments = options.parse_args()
    if min(arguments.rows, arguments.columns, arguments.touched) < 1:
        options.error("--rows, --columns and --touched must be at least 1")
    ensure_ranks(arguments)

    def measure(job: Any) -> None:
        job.gloo()
        report = Report("rows of a table", job)
        report.opening()
        case = Case(job, arguments.rows, arguments.columns, arguments.touched)
        table = case.rows * case.columns * 4
        report.say(
            f"table {case.rows} x {case.columns} float32, {table / MB:.0f} MB; {arguments.touched} rows "
            f"per rank, {case.nbytes / MB:.2f} MB on all ranks including keys"
        )
        calls = contestants(case)
        peaks = {name: max(map(max, job.gather([peak_of(call)]))) for name, call in calls.items()}
        times = alternate(job, {name: timed(call) for name, call in calls.items()}, arguments.seconds)
        summaries = report.add("rows", "s", times)
        rows = []
        for name, summary in summaries.items():
            peak = report.figure("peak bytes", name, peaks[name])
            cells = [*map(milliseconds, (summary.median, summary.p10, summary.p90)), str(summary.count)]
            rows.append([name, *cells, f"{peak / MB:.1f}", f"{peak / case.nbytes:.1f}"])
        report.table(HEADER, rows)
        report.write(arguments.json)

    run_rank(measure, ["ringdance.torch"])


if __name__ == "__main__":
    main()
