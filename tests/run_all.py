"""Run what `make test-all` has, job by job: `python tests/run_all.py [--again | --left]`.

Each job runs with all its tests, the slow ones too, in the environment of its MPI library. What has passed on
the same sources is not run again, so that this can be stopped and taken up again; build/tests/all.json
keeps what has passed. At the end, or after Ctrl-C or SIGTERM, it prints what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field

from jobs import all_jobs
from run import LOGS, NOTHING_COLLECTED, ROOT, SLOW_LIMIT, digest, stream

PASSED = LOGS / "all.json"


@dataclass(frozen=True)
class Step:
    """A call of tests/run.py: the environment's directory, the words, and additional variables."""

    venv: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.venv}: {' '.join(self.words)}"


def all_steps() -> list[Step]:
    """Return the steps in their order."""
    steps = [Step(".venv", ("--all", str(job))) for job in all_jobs()]
    for venv in (".venv-mpich", ".venv-impi"):
        steps += [Step(venv, ("--all", f"ranks/numpy-{size}")) for size in (1, 2, 3, 4)]
        steps += [Step(venv, ("faults",)), Step(venv, ("--slow", "hosts"), {"KILL_TRIALS": "1"})]
    steps.append(Step(".venv-torchvision", ("--all", "ranks/torchvision-2")))
    if shutil.which("python3.11"):  # the last one for which there is a NumPy that MXNet takes
        steps += [Step(".venv-mxnet", ("--all", str(job))) for job in all_jobs() if "mxnet" in job.needs]
    if shutil.which("cc"):  # SageMaker's toolkit is compiled when it is installed
        steps.append(Step(".venv-sagemaker", ("--slow", "hosts", "-k", "sagemaker")))
    return steps


def run(step: Step) -> tuple[bool, str]:
    """Run one step; return whether it passed, and its last line."""
    bin_ = ROOT / step.venv / "bin"
    environ = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", **step.environ}
    lines = [""]

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    command = [str(bin_ / "python"), str(ROOT / "tests" / "run.py"), *step.words]
    code, _ = stream(command, environ, SLOW_LIMIT, show)
    return code in (0, NOTHING_COLLECTED), lines[-1]


def main() -> int:
    """Run the steps that have not passed yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="run also what has passed on these sources")
    parser.add_argument("--left", action="store_true", help="only print what is left")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs begin with the first one ignored
        signal.signal(number, signal.default_int_handler)
    tree = digest()
    passed: dict[str, list[str]] = {}
    if PASSED.exists() and not arguments.again:
        passed = {name: entry for name, entry in json.loads(PASSED.read_text()).items() if entry[0] == tree}
    failed: list[Step] = []
    steps = all_steps()
    try:
        for number, step in enumerate(steps, 1):
            if arguments.left or str(step) in passed:
                continue
            print(f"\n=== {number} of {len(steps)}: {step} ===", flush=True)
            start = time.monotonic()
            good, line = run(step)
            if digest() != tree:
                sys.exit("the sources have changed meanwhile; run it again")
            if good:
                passed[str(step)] = [tree, f"{time.monotonic() - start:.0f} s", line.strip("= ")]
                LOGS.mkdir(parents=True, exist_ok=True)
                PASSED.write_text(json.dumps(passed, indent=1) + "\n")
            else:
                failed.append(step)
    except KeyboardInterrupt:
        print("\nInterrupted.")
    left = [step for step in steps if str(step) not in passed]
    print()
    for name, (_, seconds, line) in passed.items():
        print(f"passed in {seconds}: {name}: {line}")
    for step in left:
        print(f"{'FAILED' if step in failed else 'left'}: {step}")
    print(f"===== {len(passed)} of {len(steps)} passed on these sources, {len(left)} left =====")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
