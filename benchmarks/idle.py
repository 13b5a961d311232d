"""CPU use of an idle engine, and of a rank that waits for a late one.

What: percent of one core for each rank, including all threads of the process (the process's CPU clock).
Idle: after init and a few operations, the ranks sleep for ``--seconds``. Waiting: all ranks except the last
enter a blocking 4-byte all-reduce, and the last one first sleeps for ``--late`` seconds. Raw mpi4py, gloo and
each module run in separate jobs, one after another, because engines in one process cannot be told apart.

Why: an engine that polls takes cores from the computation, both on a laptop and on a fully used node.

How to read: smaller is better. A process without an engine uses nothing. "switches/s" are voluntary context
switches while idle, which shows how often the process woke up. If you start it yourself under mpiexec, the
script measures only the first module.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    DEFAULT_MODULE,
    Report,
    format_table,
    launch_environment,
    launch_line,
    modules,
    parser,
    run_rank,
    under_launcher,
)

MPI, GLOO = "mpi4py", "gloo"
HEADER = ("contestant", "idle %", "switches/s", "waiting %")
WARM_CALLS = 20
LATE_REPEATS = 3
JOB_LIMIT_SECONDS = 300


def cpu_share(body: Callable[[], object]) -> tuple[float, float]:
    """Run ``body``. Returns this process's CPU use in percent of a core, and its switches per second."""
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    cpu, wall = time.process_time(), time.perf_counter()
    body()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
    return 100 * cpu / wall, switches / wall


def contestant_call(job: Any, name: str) -> Callable[[], object]:
    """Return a blocking 4-byte all-reduce of the contestant."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(1)
    if name == MPI:
        return partial(job.comm.Allreduce, job.mpi.IN_PLACE, tensor.numpy())
    if name == GLOO:
        job.gloo()
        return partial(dist.all_reduce, tensor)
    module = job.modules[name]
    return partial(module.allreduce_, tensor, name="idle", op=module.Sum)


def measure(job: Any, name: str, seconds: float, late: float) -> list[tuple[float, float, list[float]]]:
    """Return each rank's idle CPU use, switches per second, and CPU uses while waiting (last rank: none)."""
    call = contestant_call(job, name)
    for _ in range(WARM_CALLS):
        call()
    job.barrier()
    time.sleep(0.5)  # let the effects of the operations fade, so that only idleness is measured
    idle, switches = cpu_share(lambda: time.sleep(seconds))
    waits: list[float] = []
    for _ in range(LATE_REPEATS if job.size > 1 else 0):
        job.barrier()
        if job.rank == job.size - 1:
            time.sleep(late)
            call()
        else:
            waits.append(cpu_share(call)[0])
    results: list[tuple[float, float, list[float]]] = job.comm.allgather((idle, switches, waits))
    return results


def report_rows(report: Report, name: str, found: list[tuple[float, float, list[float]]]) -> list[list[str]]:
    """Store the numbers and return the table's rows, one per rank."""
    rows = []
    for rank, (idle, switches, waits) in enumerate(found):
        report.add(f"idle, rank {rank}", "% of a core", {name: [idle]})
        report.figure(f"idle, rank {rank}", f"{name}: context switches a second", switches)
        if waits:
            report.add(f"waiting for a late rank, rank {rank}", "% of a core", {name: waits})
        waiting = f"{statistics.median(waits):.2f}" if waits else "(late)"
        rows.append([f"{name}, rank {rank}", f"{idle:.3f}", f"{switches:.1f}", waiting])
    return rows


def rank_main(arguments: argparse.Namespace) -> None:
    """Measure one contestant in this job."""
    name = arguments.contestant or (modules(arguments) or [MPI])[0]

    def body(job: Any) -> None:
        report = Report("idle and waiting CPU", job)
        report.opening()
        report.table(HEADER, report_rows(report, name, measure(job, name, arguments.seconds, arguments.late)))
        report.write(arguments.json)

    run_rank(body, [] if name in (MPI, GLOO) else [name])


def run_jobs(arguments: argparse.Namespace) -> None:
    """Start a job for each contestant and print all results together.

    Raises:
        SystemExit: A job failed. The exit code is the job's.
    """
    parts = []
    with tempfile.TemporaryDirectory() as directory:
        for name in [MPI, GLOO, *modules(arguments)]:
            path = Path(directory) / f"{name}.json"
            command = [sys.executable, sys.argv[0], "--contestant", name, "--json", str(path)]
            command += ["--seconds", str(arguments.seconds), "--late", str(arguments.late), "--module", name]
            line = launch_line(arguments.np, command, arguments.launcher)
            code = subprocess.run(
                line, env=launch_environment(), timeout=JOB_LIMIT_SECONDS + arguments.seconds, check=False
            ).returncode
            if code or not path.exists():
                raise SystemExit(code or f"{name}: the job ended without a result")
            parts.append(json.loads(path.read_text()))
    print("\nall together:")
    print(format_table(HEADER, [row for part in parts for row in together(part["results"])]))
    if arguments.json:
        whole = {**parts[-1], "arguments": sys.argv[1:]}
        whole["results"] = [result for part in parts for result in part["results"]]
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")


def together(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the table's rows for one job from its JSON results."""
    rows: dict[str, list[str]] = {}
    for result in results:
        rank = result["group"].rsplit(" ", 1)[1]
        if result["group"].startswith("waiting"):
            rows[rank][3] = f"{result['median']:.2f}"
        elif "figure" in result:
            rows[rank][2] = f"{result['value']:.1f}"
        else:
            name = f"{result['contestant']}, rank {rank}"
            rows[rank] = [name, f"{result['median']:.3f}", "", "(late)"]
    return list(rows.values())


def main() -> None:
    """Parse the arguments, then start the jobs or measure in a rank."""
    options = parser(__doc__, "idle.py", seconds=10)
    options.add_argument("--late", type=float, default=2, help="seconds by which the last rank is late")
    options.add_argument("--contestant", help="measure only this one: mpi4py, gloo or a module (in a rank)")
    arguments = options.parse_args()
    if arguments.module == [DEFAULT_MODULE] and arguments.contestant not in (None, MPI, GLOO):
        arguments.module = [arguments.contestant]
    if under_launcher():
        rank_main(arguments)
    else:
        run_jobs(arguments)


if __name__ == "__main__":
    main()
