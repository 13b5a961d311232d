"""`benchmarks/strategies/compare.py` compares strategies of training on real processes."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, blocks, environment

PAGE = ROOT / "docs" / "howto" / "training" / "strategies.md"
GENERATE, COMPARE = (
    shlex.split(command)[1:] for block in blocks(PAGE) if block.language == "console"
    for command, _ in block.commands()
)  # fmt: skip
SCRIPT = ROOT / COMPARE[0]
SMALL = ("--dim", "4", "--hidden", "16", "--batch-size", "256", "--validation-rows", "1000", "-np", "2")


def run(directory: Path, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory."""
    return subprocess.run(
        [sys.executable, *words], cwd=directory, env={**environment(), **more}, text=True,
        capture_output=True, timeout=550,
    )  # fmt: skip


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    words = ("--rows", "10000", "--table-size", "5000", "--validation", "0.2")
    made = run(tmp_path, "-m", "ringdance", *GENERATE, *words)
    assert made.returncode == 0, made.stderr
    return tmp_path


def results(directory: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (directory / "comparison").glob("*-*.json")}


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_strategy_that_fails_is_a_row_and_the_next_time_only_it_is_run(clicks: Path) -> None:
    pytest.importorskip("torch")
    words = (SCRIPT, *COMPARE[1:], "--strategies", "ringdance,ddp", "--rows", "20000")
    done = run(clicks, *words, "--framework", "torch", *SMALL, GLOO_SOCKET_IFNAME="nowhere")
    assert done.returncode == 1, done.stderr
    assert "| PyTorch ddp | failed: " in done.stdout
    assert "| PyTorch ringdance | 2 |" in done.stdout
    first = results(clicks)
    assert first["torch-ddp"]["error"]
    done = run(clicks, *words, "--framework", "torch", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "torch ringdance: starting" not in done.stderr
    result = results(clicks)
    assert result["torch-ringdance"] == first["torch-ringdance"]
    for tensor in result.values():
        assert tensor["curve"][-1][0] == 20000 // 256 * 256 + 256
        assert tensor["processes"] == 2
        assert 0 < tensor["cores_busy"] <= 2 * len(tensor["curve"])
        assert tensor["memory"] > 10**7
    ours, ddp = (result[f"torch-{name}"]["curve"] for name in ("ringdance", "ddp"))
    assert [point[2] for point in ours] == pytest.approx([point[2] for point in ddp], abs=1e-3)
    assert ours[-1][2] > 0.6
    other = run(clicks, *words, "--framework", "torch", *SMALL[2:], "--dim", "8")
    assert other.returncode == 2
    assert "sizes" in other.stderr
    assert "--again" in other.stderr


@pytest.mark.slow
@pytest.mark.limit(560)
def test_all_strategies_reach_the_same_auc(clicks: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    done = run(clicks, SCRIPT, *COMPARE[1:], *SMALL)
    assert done.returncode == 0, done.stderr
    result = results(clicks)
    assert len(result) == 9
    aucs = {name: value["curve"][-1][2] for name, value in result.items()}
    asynchronous = aucs.pop("tensorflow-parameter_server")
    assert max(aucs.values()) - min(aucs.values()) < 0.002, aucs
    assert asynchronous > 0.55
    assert result["tensorflow-parameter_server"]["processes"] == 5
    assert (clicks / "comparison" / "curves.svg").stat().st_size > 1000


def test_wrong_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, SCRIPT, "nowhere")
    assert done.returncode == 2, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (("nowhere", "--strategies", "towers"), "'towers'"),
        (("nowhere", "--batch-size", "7", "-np", "2"), "7 cannot be divided among 2"),
        (("nowhere", "--framework", "torch", "--strategies", "tower"), "none of these strategies"),
    ):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert said in capsys.readouterr().err
