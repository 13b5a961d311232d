"""Accelerate, Transformers and Lightning under `ringdance run`: the scripts of their page in docs/.

Each script trains the same weights in four ways: under torchrun, the tools' own way; under `ringdance run`;
with the backend "ringdance"; and with `hvd.DistributedOptimizer` instead of DistributedDataParallel.
test_docs_commands.py runs the page's commands and checks their output.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, environment, put_files

PAGE = ROOT / "docs" / "howto" / "training" / "torch-tools.md"
LIMIT = 240.0
# What report() in the page's task.py does in addition.
SAVE = """
report_only = report
def report(rank, size):
    report_only(rank, size)
    torch.save((rank, size, model.state_dict()), sys.argv[1] + os.environ["RANK"])
"""


def results(directory: Path, size: int, name: str, *launcher: str) -> list[dict[str, Any]]:
    """Run a script of the page and return its ranks' weights. Ranks must see their rank and size."""
    import torch

    out = directory / f"{launcher[1]}-{size}-{name}-"
    done = subprocess.run(
        [sys.executable, "-m", *launcher, f"{name}.py", str(out)],
        cwd=directory, env=environment() | {"OMP_NUM_THREADS": "1"}, text=True, timeout=LIMIT,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [torch.load(f"{out}{rank}") for rank in range(size)]
    assert [(rank, of) for rank, of, _ in collected] == [(rank, size) for rank in range(size)]
    script = (directory / f"{name}.py").read_text()
    assert done.stdout.count("batches per rank") == ("batches per" in script)
    return [weights for _, _, weights in collected]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.limit(5 * LIMIT)
@pytest.mark.parametrize("tool", ["accelerate", "transformers", "fabric", "lightning"])
def test_the_weights_are_those_of_torchrun(tool: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("lightning" if tool == "fabric" else tool)
    put_files(PAGE, tmp_path)
    task = tmp_path / "task.py"
    task.write_text(f"import os, sys\n{task.read_text()}{SAVE}")
    name = f"train_{tool}"
    own = results(tmp_path, 2, name, "torch.distributed.run", "--nproc-per-node=2", "--standalone")[0]
    for weights in results(tmp_path, 2, name, "ringdance", "run", "-np", "2", "python"):
        assert same(weights, own)
    for weights in results(tmp_path, 2, f"{name}_hvd", "ringdance", "run", "-np", "2", "python"):
        assert all(torch.allclose(weights[item], own[item], rtol=0, atol=1e-6) for item in own)
    plain = task.read_text()
    task.write_text(f"import torch.distributed as d\nd.init_process_group('ringdance')\n{plain}")
    for weights in results(tmp_path, 2, name, "ringdance", "run", "-np", "2", "python"):
        assert same(weights, own)
    task.write_text(plain)
    first, *others = results(tmp_path, 3, f"{name}_hvd", "ringdance", "run", "-np", "3", "python")
    assert all(same(first, other) for other in others)
    first, *others = results(tmp_path, 3, name, "ringdance", "run", "-np", "3", "python")
    assert all(same(first, other) for other in others)
