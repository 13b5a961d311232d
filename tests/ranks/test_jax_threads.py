"""XLA computes with this rank's share of the cores."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

import ringdance.jax as hvd
from ringdance.training.options import share_of_cores

hvd.init()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_init_gives_each_rank_its_share() -> None:
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert names.count("tf_XLAEigen") == share_of_cores(hvd.local_size())
