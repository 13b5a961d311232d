"""The script in docs/tutorials/frameworks.md, the examples, and XLA's number of threads."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
from script_jobs import ROOT, check_shown_script, output_of

import ringdance.jax as hvd
from ringdance.training.gradients.options import share_of_cores

hvd.init()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_computes_with_its_share_of_the_cores() -> None:
    if tuple(map(int, version("jax").split(".")[:2])) < (0, 8):
        pytest.skip("XLA's threads have no names in this JAX")
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert names.count("tf_XLAEigen") == share_of_cores()


@pytest.mark.ranks(2)
def test_the_page(tmp_path: Path) -> None:
    command = "ringdance run -np 2 python train_jax.py"
    check_shown_script("docs/tutorials/frameworks.md", command, tmp_path, hvd.rank())


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "needs"), [("jax", "optax"), ("flax", "flax")])
def test_the_examples(name: str, needs: str) -> None:
    for module in ("sklearn", needs):
        pytest.importorskip(module)
    out = output_of(ROOT / "examples" / f"digits_{name}.py")
    if hvd.rank() == 0:
        assert "all 2 ranks hold the same weights: yes" in out
        assert float(re.findall(r"test accuracy: ([\d.]+)%", out)[0]) > 95
