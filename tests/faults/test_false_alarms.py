"""No warning about ranks that are merely slow, and no error as long as any of them may continue.

``QUIET_MINUTES=30`` is the full length, with a compilation of 60 s and evaluations of 2 minutes. Without it,
a short form runs. ``python tests/faults/test_false_alarms.py MINUTES [KIND ...]`` prints counts of long work
by outcome.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from long_work_job import FOR_EVER, LONG
from run import launcher

JOB = Path(__file__).with_name("quiet_job.py")
LONG_WORK = Path(__file__).with_name("long_work_job.py")
DEADLOCK = "none of them can ever continue"


@pytest.mark.slow
def test_ranks_that_take_their_time_are_no_stall() -> None:
    minutes = float(os.environ.get("QUIET_MINUTES", "1.6"))
    factor = 1.0 if minutes >= 10 else 0.15
    command = [sys.executable, str(JOB), str(minutes), str(factor)]
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", "run", "-np", "3", *command],
        capture_output=True, text=True, check=False, timeout=60 * minutes + 300,
        env={k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "RINGDANCE_"))},
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert " has waited " not in done.stderr
    assert " s ago '" not in done.stderr


def run_long_work(kinds: Sequence[str], deadlock_time: float, seconds: float) -> tuple[int, str]:
    """Run kinds of long work on three ranks and return the exit code and the output."""
    command, environ = launcher(3)
    environ |= {
        "RINGDANCE_DEADLOCK_TIME": str(deadlock_time),
        "RINGDANCE_STALL_CHECK_TIME": str(deadlock_time / 7.5),
    }
    done = subprocess.run(
        [*command, sys.executable, str(LONG_WORK), str(seconds), *kinds], env=environ, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300 + 10 * seconds * len(kinds),
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.limit(400)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems only get warnings")
def test_long_work_is_no_deadlock() -> None:
    kinds = [
        "late_result", "limited_wait", "one_of_two_gives_up", "reader", "reader elsewhere",
        "other_process elsewhere", "c_timer elsewhere", "in_a_signal",
    ]  # fmt: skip
    code, text = run_long_work(kinds, deadlock_time=0.5, seconds=1.5)
    assert code == 0, text
    assert all(f"{kind}: ok" in text for kind in kinds)


@pytest.mark.limit(400)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems only get warnings")
@pytest.mark.parametrize("kind", ["on_threads", pytest.param("in_a_graph", marks=pytest.mark.slow)])
def test_a_deadlock_is_found_whatever_sleeps_besides(kind: str) -> None:
    if kind == "in_a_graph":
        pytest.importorskip("tensorflow")
    code, text = run_long_work([kind], deadlock_time=1.0, seconds=0.0)
    assert code != 0
    assert DEADLOCK in text, text  # mpiexec may end the other ranks before they print theirs


def soak(minutes: float, kinds: Sequence[str]) -> Counter[str]:
    """Run jobs with random kinds of long work, with times cut to a tenth or less. Count the outcomes.

    One in five jobs, on average, can never continue.
    """
    chance, ends, until = random.Random(), Counter[str](), time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        chosen, deadlock_time = chance.sample(kinds, min(4, len(kinds))), chance.choice([0.5, 1.0, 3.0])
        if planted := chance.random() < 0.2:
            chosen = [chance.choice(list(FOR_EVER))]
        code, text = run_long_work(chosen, deadlock_time, 4 * deadlock_time)
        reported = DEADLOCK in text
        end = (
            ("found" if reported else "missed")
            if planted
            else "false"
            if reported
            else "ok"
            if not code
            else "failed"
        )
        ends[f"deadlocks {end}" if planted or reported else f"jobs {end}"] += 1
        ends["kinds of long work"] += text.count(": ok")
        if end in ("missed", "false", "failed"):
            print(f"{chosen}, {deadlock_time:g} s: {end}, {code}\n{text[-3000:]}", flush=True)
    return ends


@pytest.mark.slow
@pytest.mark.limit(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems only get warnings")
def test_long_work_of_all_kinds_is_no_deadlock() -> None:
    ends = soak(float(os.environ.get("QUIET_MINUTES", "3")), list(LONG))
    print(dict(ends))
    assert ends["jobs failed"] == ends["deadlocks false"] == ends["deadlocks missed"] == 0


if __name__ == "__main__":
    print(dict(soak(float(sys.argv[1]), sys.argv[2:] or list(LONG))))
