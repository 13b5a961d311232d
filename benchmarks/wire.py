"""All-reduce of 16 MiB between two hosts at 1 Gbit/s, through the engine with its default settings.

What: this script creates two hosts from network namespaces on this machine (it needs root, ``ip`` and
``sshd``; see tests/hosts/hosts.py), with links limited to ``--rate``, and starts one rank on each with
``ringdance run -H h1:1,h2:1``. In one job, the engine and raw mpi4py ``Allreduce`` in place take turns. With
``--other PYTHON``, the interpreter of an environment with another MPI library (and ringdance), jobs with both
libraries also take turns.

Why: between hosts, the wire is the limit. An engine that leaves it idle while it packs, waits or sleeps
loses time that cannot be regained.

How to read: a sample is the slower rank's time. The table shows the median of all samples. "of best" is the
time of the best raw library divided by the contestant's time (larger is better). "x wire" is the time as a
multiple of the bound: the time to send each rank's data at the link's rate without any headers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import Summary, format_table, summarize, under_launcher

HERE = Path(__file__).resolve()
MARK = "samples: "
ENGINE, RAW = "engine", "raw"
WARM_CALLS = 2


def rank(nbytes: int, seconds: float) -> None:
    """Measure in a rank. Rank 0 prints the library and the milliseconds by contestant as JSON."""
    import numpy as np

    import ringdance.numpy as rd

    rd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    array = np.zeros(nbytes // 4, np.float32)
    calls: dict[str, Callable[[], object]] = {
        ENGINE: lambda: rd.allreduce(array, op=rd.Sum, name="wire", out=array),
        RAW: lambda: comm.Allreduce(MPI.IN_PLACE, array),
    }
    for call in calls.values():
        array[:] = rd.rank() + 1
        call()
        if not (array == rd.size() * (rd.size() + 1) / 2).all():
            raise RuntimeError("wrong sum")
    array[:] = 0
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    cycle = 0
    while comm.bcast(time.perf_counter() < end or cycle < WARM_CALLS + 1):
        for name, call in calls.items():
            comm.Barrier()
            start = time.perf_counter()
            call()
            took = comm.allreduce(1e3 * (time.perf_counter() - start), MPI.MAX)
            if cycle >= WARM_CALLS:
                samples[name].append(took)
        cycle += 1
    if rd.rank() == 0:
        library = MPI.Get_library_version().strip("\0\n").splitlines()[0].split(",")[0]
        print(MARK + json.dumps({"library": library, "samples": samples}), flush=True)
    rd.shutdown()


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Create the hosts and run the jobs. Returns milliseconds by library and contestant."""
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "hosts"))
    from hosts import Hosts, why_not

    if why_not():
        raise SystemExit(f"wire.py: cannot create hosts: {why_not()}")
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="wire-") as directory:
        hosts = Hosts(Path(directory) / "net", 2, rate=arguments.rate)
        try:
            for _ in range(arguments.rounds):
                for python in [sys.executable, *arguments.other]:
                    line = [python, "-m", "ringdance", "run", "--no-prefix", "-H", f"h1:{arguments.slots},"]
                    line[-1] += f"h2:{arguments.slots}"
                    line += ["python", str(HERE), "--size", str(arguments.size)]
                    line += ["--seconds", str(arguments.seconds / arguments.rounds)]
                    job = hosts.run("h1", *line, timeout=300.0, env=environment(python))
                    marked = [text for text in job.stdout.splitlines() if text.startswith(MARK)]
                    if job.returncode or not marked:
                        raise SystemExit(f"wire.py: {python}: exit code {job.returncode}\n{job.stderr}")
                    answer = json.loads(marked[0][len(MARK) :])
                    of_library = times.setdefault(answer["library"], {ENGINE: [], RAW: []})
                    for name, samples in answer["samples"].items():
                        of_library[name] += samples
        finally:
            hosts.down()
    return times


def environment(python: str) -> dict[str, str]:
    """Return the environment of a job with this interpreter. The interpreter's programs come first."""
    return {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}


def show(found: dict[str, dict[str, list[float]]], bound: float) -> dict[str, Summary]:
    """Print the table, and return the summaries by contestant."""
    summaries = {
        f"{name}, {library}": summarize(samples)
        for library, both in found.items()
        for name, samples in both.items()
    }
    best = min(summary.median for name, summary in summaries.items() if name.startswith(RAW))
    rows = [
        [name, *(f"{value:.1f}" for value in (summary.median, summary.p10, summary.p90)), str(summary.count)]
        + [f"{best / summary.median:.2f}", f"{summary.median / bound:.2f}"]
        for name, summary in summaries.items()
    ]
    print(format_table(("contestant", "median ms", "p10", "p90", "calls", "of best", "x wire"), rows))
    return summaries


def main() -> None:
    """Start the measurement, or run as one of its ranks."""
    parser = argparse.ArgumentParser(
        prog="wire.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=16 << 20, help="bytes (default 16 MiB)")
    add("--rate", type=int, default=1000, help="speed of each host's link in Mbit/s (default 1000)")
    add("--slots", type=int, default=1, help="ranks on each host (default 1)")
    add("--seconds", type=float, default=10.0, help="time for each library (default 10)")
    add("--rounds", type=int, default=2, help="jobs per library, in turn (default 2)")
    add("--other", nargs="+", default=[], metavar="PYTHON", help="interpreters with other MPI libraries")
    add("--json", type=Path, metavar="FILE", help="write the numbers to FILE as well")
    arguments = parser.parse_args()
    if under_launcher():
        rank(arguments.size, arguments.seconds)
        return
    ranks = 2 * arguments.slots
    # The ranks of a host add their data in shared memory. Then each host sends as much as in a ring of two.
    bound = arguments.size * 8 / (arguments.rate * 1e3)
    print(
        f"wire: {ranks} ranks on 2 hosts, {arguments.size} bytes at {arguments.rate} Mbit/s: {bound:.0f} ms"
    )
    summaries = show(measure(arguments), bound)
    if arguments.json:
        content = {name: vars(summary) for name, summary in summaries.items()}
        arguments.json.write_text(json.dumps({"bound_ms": bound, "results": content}, indent=1) + "\n")


if __name__ == "__main__":
    main()
