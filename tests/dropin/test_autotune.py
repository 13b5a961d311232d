"""A training that is tuned while it runs computes the same parameters and writes its files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from script_jobs import LIMIT, Outcome, Task

pytest.importorskip("torch")

TRAIN = """
import hashlib
import os
import torch
import ringdance.torch as hvd

def train():
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(300):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=data)).pow(2).mean().backward()
        optimizer.step()
    hvd.shutdown()
    parameters = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print("parameters", hashlib.sha256(parameters).hexdigest(), flush=True)

os.environ.update({"RINGDANCE_AUTOTUNE": "1", "RINGDANCE_AUTOTUNE_LOG": "tune.csv"})
train()
del os.environ["RINGDANCE_AUTOTUNE"], os.environ["RINGDANCE_AUTOTUNE_LOG"]
train()
"""


def on_two_ranks(above: Path) -> dict[str, Task]:
    (above / "train.py").write_text(TRAIN)
    (above / "autotune").mkdir()
    return {"autotune": Task(str(above / "train.py"), (), above / "autotune")}


@pytest.mark.limit(4 * LIMIT)
def test_the_same_parameters_with_and_without(shared_job: dict[str, Outcome]) -> None:
    done = shared_job["autotune"]
    assert done.code == 0, done.err
    check(2, done.out, done.err, done.directory)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_by_the_launcher_s_options(tmp_path: Path, size: int) -> None:
    (tmp_path / "train.py").write_text("\n".join(line for line in TRAIN.splitlines() if "update" not in line))
    command = [sys.executable, "-m", "ringdance", "run", "-np", str(size), "--no-prefix"]
    options = ["--autotune", "--autotune-log-file", "tune.csv", "python", "train.py"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    check(size, done.stdout, done.stderr, tmp_path)


def check(size: int, out: str, err: str, directory: Path) -> None:
    lines = out.splitlines()
    assert len(lines) == 2 * size
    assert len(set(lines)) == 1
    (line,) = [line for line in err.splitlines() if line.startswith("ringdance autotune: ")]
    rows = list(csv.DictReader((directory / "tune.csv").open()))
    assert [row["outcome"] for row in (rows[0], rows[-1])] == ["start", "final"]
    assert int(rows[-1]["step"]) <= 285
    result = json.loads((directory / "tune.json").read_text())
    assert f"ringdance autotune: {result['won']}" == line
    assert result["job"]["gradients"] == 4
    assert result["job"]["ranks"] == size
