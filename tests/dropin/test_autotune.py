"""A training that is tuned while it runs, by ``ringdance run``: the same parameters, and the files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

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

train()
del os.environ["RINGDANCE_AUTOTUNE"], os.environ["RINGDANCE_AUTOTUNE_LOG"]
train()
"""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.limit(160)
def test_the_same_parameters_with_and_without(tmp_path: Path, size: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "ringdance", "run", "-np", str(size), "--no-prefix"]
    options = ["--autotune", "--autotune-log-file", "tune.csv", "python", "train.py"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * size
    assert len(set(lines)) == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringdance autotune: ")]
    rows = list(csv.DictReader((tmp_path / "tune.csv").open()))
    assert [row["outcome"] for row in (rows[0], rows[-1])] == ["start", "final"]
    assert int(rows[-1]["step"]) <= 285
    result = json.loads((tmp_path / "tune.json").read_text())
    assert f"ringdance autotune: {result['won']}" == line
    assert result["job"]["gradients"] == 4
    assert result["job"]["ranks"] == size
