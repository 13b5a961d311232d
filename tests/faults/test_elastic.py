"""Elastic training that cannot continue, because a rank has exited and hosts and processes are fixed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import by_main, script
from sampled import sampled

from ringdance.training.elastic import MOST_FAILURES

PROGRAM = """
    import os, signal, sys, time
    import ringdance.numpy as hvd
    import numpy as np
    from ringdance.training.elastic import ObjectState, run

    hvd.init()
    state = ObjectState(step=0)

    @run
    def train(state):
        print("begins at", state.step, flush=True)
        while state.step < 20:
            hvd.allreduce(np.ones(10, np.float32), name="gradients")
            state.step += 1
            if state.step % 5 == 0:
                state.commit()
            if state.step == 12 and hvd.rank() == 1:
                how()
        return "through"

    def how():
        HOW

    print(train(state), flush=True)
"""


# How a rank ends, the job's exit code, and the cause that the job reports.
ENDS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    "raises": ("raise ValueError('my own')", 1, "ValueError: my own"),
    "ends": ("sys.exit(0)", 1, "exchanges, while other ranks waited for it"),
    "exits": ("sys.exit(5)", 5, "exited with code 5"),
}


def run_job(directory: Path, how: str, *options: str, program: str = PROGRAM) -> tuple[int, str]:
    program = script(directory, program.replace("HOW", how))
    done = by_main("run", "-np", "3", *options, "python", program)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.limit(120)
@pytest.mark.parametrize("end", sampled("ends of elastic training", list(ENDS), 1, always=["killed"]))
def test_the_job_ends_with_the_cause(tmp_path: Path, end: str) -> None:
    how, code, cause = ENDS[end]
    returned, output = run_job(tmp_path, how)
    assert returned == code
    assert re.search(rf"first failure: rank 1 of 3 on .*{cause}", output)
    assert output.count("begins at") == 3  # no rank has restarted
    assert "through" not in output


@pytest.mark.limit(120)
def test_a_rank_that_does_not_come_back(tmp_path: Path) -> None:
    """A rank that leaves the job and does something else is reported by the others after a while."""
    how = "hvd.shutdown(); time.sleep(600)"
    returned, output = run_job(tmp_path, how, "-x", "RINGDANCE_ELASTIC_TIMEOUT=2")
    assert returned != 0
    assert "some of its 3 ranks were not ready within 2 s (elastic_timeout)" in output
    assert "Still missing: rank 1 (pid " in output
    assert output.count("begins at") == 3


@pytest.mark.limit(120)
def test_a_mismatch_that_comes_each_time(tmp_path: Path) -> None:
    everywhere = PROGRAM.replace(" and hvd.rank() == 1", "")
    how = "hvd.allreduce(np.ones(1 + hvd.rank(), np.float32), name='planted')"
    returned, output = run_job(tmp_path, how, program=everywhere)
    assert returned == 1
    assert output.count("begins at 0") == 3
    assert output.count("begins at 10") == 3 * MOST_FAILURES
    assert "MismatchError: Mismatched shapes" in output
    assert "Giving up" in output
