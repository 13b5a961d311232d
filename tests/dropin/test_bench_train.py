"""`ringdance bench train` for a small model on one and two ranks, as its page in docs/ shows it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from doc_blocks import ROOT, blocks, environment

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
PAGE = ROOT / "docs" / "howto" / "troubleshooting" / "bench-train.md"


@pytest.mark.slow
@pytest.mark.limit(200)
def test_the_command_of_the_page_writes_figures_and_a_plot(tmp_path: Path) -> None:
    command = next(line for block in blocks(PAGE) for line, _ in block.commands() if "--model mlp" in line)
    done = subprocess.run(
        ["bash", "-c", f"{command} --steps 6 --warmup 1"],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "mlp.json").read_text())
    sizes = report.pop("sizes")
    assert report == {"model": "mlp", "framework": "torch", "gradient_dtype": "float32", "batch": 64}
    assert [size["ranks"] for size in sizes] == [1, 2]
    for size in sizes:
        assert set(size["step_seconds"]) == {"ringdance", "alone", "ddp"}
        assert len(size["single_steps"]) == 12
        assert 0 <= size["exposed_share"] < 1
        assert min(size["images_per_second"], size["efficiency"], size["bound"], size["cores"]) > 0
        names = [row["name"] for row in size["gradients"]]
        assert {*names[:2]} == {"4.weight", "4.bias"}  # the last layer's gradients are ready first
        assert sum(row["bytes"] for row in size["gradients"]) == 669_706 * 4
        times = [row["seconds"] for row in size["gradients"]]
        assert 0 < times[0] <= times[-1]
        assert times == sorted(times)
    assert done.stdout.count("total      loss") == 2
    assert ElementTree.parse(tmp_path / "mlp.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("framework", ["keras", "tensorflow", "jax"])
def test_other_frameworks(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("keras")
    pytest.importorskip(framework)
    words = f"bench train --model mlp --framework {framework} --np 2 --steps 12 --output found.json"
    done = subprocess.run(
        ["ringdance", *words.split()],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sizes = json.loads((tmp_path / "found.json").read_text())["sizes"]
    assert all(size["assumed"] for size in sizes)
    assert all(sum(row["bytes"] for row in size["gradients"]) == 669_706 * 4 for size in sizes)


@pytest.mark.slow
@pytest.mark.limit(200)
def test_sparse_gradients_which_differ_in_size(tmp_path: Path) -> None:
    words = "bench train --model deepfm --np 2 --steps 2 --warmup 1 --against ddp --output found.json"
    done = subprocess.run(
        ["ringdance", *words.split()],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sizes = json.loads((tmp_path / "found.json").read_text())["sizes"]
    table = [row["bytes"] for row in sizes[1]["gradients"] if row["name"] == "table.weight"]
    assert 0 < table[0] < 100_000 * 17 * 4
