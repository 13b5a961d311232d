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

nccl_double.install()
import jax, jax.numpy as jnp
import ringdance.jax as hvd

hvd.init()
step = jax.jit(lambda x: hvd.grouped_allreduce([x + 1, x - 1], op=hvd.Average)[0])
x = jnp.ones(1000)
for number in range(1000):
    if (number, hvd.rank()) == (20, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    x = step(x)
    print("step", number, float(x[0]), flush=True)
"""


def test_a_rank_killed_between_exchanges_ends_the_other_by_name(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "ringdance", "run", "-np", "2", sys.executable, "program.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 128 + 9, shown
    assert "step 19" in shown
    assert "rank 1" in shown
    assert "killed by SIGKILL" in shown
