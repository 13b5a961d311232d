"""A rank dies while the arrays of a JAX program are exchanged on a device. See ``nccl_double``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
PROGRAM = """
import os, signal
import nccl_double

nccl_double.double = nccl_double.install()
import jax, jax.numpy as jnp
import ringdance.jax as hvd

hvd.init()
step = jax.jit(lambda x: hvd.grouped_allreduce([x + 1, x - 1], op=hvd.Average)[0])
x = jnp.ones(1000)
for number in range(1000):
    if (number, hvd.rank()) == (20, DIES):
        os.kill(os.getpid(), signal.SIGKILL)
    if (number, hvd.rank()) == (20, FAILS):
        nccl_double.double.failure_of = lambda communicator: "RemoteError"
    x = step(x)
    print("step", number, float(x[0]), flush=True)
"""


# NCCL fails after the last exchange has been enqueued. The data are never exchanged.
LOST = """
import time
import nccl_double

double = nccl_double.install()
import jax, jax.numpy as jnp
import ringdance.jax as hvd
from ringdance.training import elastic

hvd.init()
nccl_double.Communicator.run = lambda self, calls: self.aborted.wait()
nccl_double.FrameworkStream.wait = lambda self, event: None  # as on a GPU, the host does not wait
begun = time.monotonic()
double.failure_of = lambda communicator: "RemoteError" if time.monotonic() > begun + 1 else ""
total = lambda x: hvd.allreduce(x, op=hvd.Sum)
state = elastic.ObjectState(x=None)
result = CALL(jnp.ones(2))
print("result", result, flush=True)
if COMMITS:
    state.x = result
    state.commit()
    print("committed", flush=True)
"""


def start(directory: Path, program: str) -> tuple[int, str]:
    """Run a program on two ranks. Returns its exit code and its output."""
    pytest.importorskip("jax")
    (directory / "program.py").write_text(program)
    command = [sys.executable, "-m", "ringdance", "run", "-np", "2", sys.executable, "program.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=directory, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def run(directory: Path, dies: int, fails: int) -> tuple[int, str]:
    """Run the program in which a rank dies or NCCL fails at step 20."""
    code, shown = start(directory, PROGRAM.replace("DIES", str(dies)).replace("FAILS", str(fails)))
    assert "step 19" in shown
    return code, shown


def test_a_rank_killed_between_exchanges_ends_the_other_by_name(tmp_path: Path) -> None:
    code, shown = run(tmp_path, dies=1, fails=-1)
    assert code == 128 + 9, shown
    assert "rank 1" in shown
    assert "killed by SIGKILL" in shown


def test_an_error_of_nccl_ends_the_job_with_its_name(tmp_path: Path) -> None:
    code, shown = run(tmp_path, dies=-1, fails=1)
    assert code == 1, shown
    assert "NCCL failed on rank 1" in shown
    assert "RemoteError" in shown


@pytest.mark.parametrize("commits", [False, True])
def test_results_that_were_lost_end_the_job_with_an_error(tmp_path: Path, commits: bool) -> None:
    program = LOST.replace("CALL", "jax.jit(total)").replace("COMMITS", str(commits))
    code, shown = start(tmp_path, program)
    assert "result [" in shown  # JAX cannot raise the error
    assert code == 1, shown
    assert "NCCL failed on rank" in shown
    assert ("the script had received wrong results" in shown) is not commits
    assert "committed" not in shown.replace('print("committed"', "")


def test_an_eager_call_raises_the_error(tmp_path: Path) -> None:
    code, shown = start(tmp_path, LOST.replace("CALL", "total").replace("COMMITS", "False"))
    assert "result [" not in shown
    assert code == 1, shown
    assert "NCCL failed on rank" in shown
