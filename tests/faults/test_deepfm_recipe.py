"""The recipes for click logs: trained, scored, killed in mid-epoch and resumed, sharded."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from processes import Job, needed, start, wait_until

import ringdance.recipes.deepfm
from ringdance.training.checkpoint_files import CheckpointFiles

needed("pyarrow", "torch")

RECIPES = Path(ringdance.recipes.deepfm.__file__).parent
ROWS, BATCH = 40_000, 256
OPTIONS = (
    "--batch-size", str(BATCH), "--dim", "4", "--hidden", "16,16", "--table-rate", "0.07", "--rate", "0.008",
    "--warmup", "10", "--log-every", "10",
)  # fmt: skip


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create rows with a planted signal, and rows for validation."""
    target = tmp_path_factory.mktemp("clicks") / "set"
    words = ("data", "generate", "criteo", str(target), "--rows", str(ROWS), "--validation", "0.2")
    command = [sys.executable, "-m", "ringdance", *words, "--table-size", "20000"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return target


def begin(directory: Path, recipe: str, ranks: int, clicks: Path, *words: str) -> tuple[Job, Path]:
    """Start a training and return it with its output file."""
    number = len(list(directory.glob("*.txt")))
    output = directory / f"{number}.txt"
    script = str(RECIPES / f"train_{recipe}.py")
    with output.open("wb") as file:
        job = start(
            directory / f"job-{number}", "-np", str(ranks), sys.executable, script, str(clicks), *OPTIONS,
            *words, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return job, output


def run(directory: Path, recipe: str, ranks: int, clicks: Path, *words: str) -> str:
    """Train to the end and return the output."""
    job, output = begin(directory, recipe, ranks, clicks, *words)
    assert job.process.wait(240) == 0, output.read_text()
    return output.read_text()


def auc_of(text: str) -> float:
    """Return the last AUC in an output."""
    return float(re.findall(r"AUC (0\.\d+)", text)[-1])


def kill(job: Job) -> None:
    """Kill the ranks and the processes that started them, all at once."""
    everything = [psutil.Process(job.process.pid), *job.processes()]
    for act in (signal.SIGSTOP, signal.SIGKILL):
        for process in everything:
            if process.is_running():
                process.send_signal(act)
    job.process.wait()
    assert wait_until(lambda: not job.processes(), 20) is not None, job.leftovers()


def learned_and_scored(directory: Path, recipe: str, clicks: Path, ranks: int = 2) -> float:
    """Train for the same number of steps on any number of ranks. Score validation rows, return their AUC."""
    model = directory / "model"
    text = run(directory, recipe, ranks, clicks, "--epochs", str(ranks), "--export", str(model))
    assert "on 8,000 validation rows" in text
    scores = directory / "scores.tsv"
    command = [sys.executable, str(RECIPES.with_name("score.py")), str(model), str(clicks)]
    command += ["--split", "validation"]
    done = subprocess.run([*command, "--output", str(scores)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert auc_of(done.stderr) == pytest.approx(auc_of(text), abs=2e-5)
    assert np.loadtxt(scores).shape == (8000, 2)
    return auc_of(text)


@pytest.mark.limit(120)
def test_a_model_learns_and_scores_new_rows(clicks: Path, tmp_path: Path) -> None:
    assert learned_and_scored(tmp_path, "torch", clicks, ranks=1) > 0.7


@pytest.mark.slow
@pytest.mark.limit(300)
def test_yesterdays_model_is_a_start_if_it_is_of_this_kind(clicks: Path, tmp_path: Path) -> None:
    auc = learned_and_scored(tmp_path, "torch", clicks)
    model = tmp_path / "model"
    started = run(tmp_path, "torch", 2, clicks, "--warm-start", str(model), "--steps", "1")
    assert auc_of(started) == pytest.approx(auc, abs=0.003)
    about = model / "model.json"
    about.write_text(about.read_text().replace('"torch"', '"tensorflow"'))
    job, output = begin(tmp_path, "torch", 2, clicks, "--warm-start", str(model))
    assert job.process.wait(120) == 1
    assert "its framework is tensorflow, but here it is torch" in output.read_text()


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_sharded_table_is_as_good(clicks: Path, tmp_path: Path) -> None:
    plain = run(tmp_path, "torch", 2, clicks)
    sharded = run(tmp_path, "torch", 2, clicks, "--sharded")
    assert "sharded" in sharded
    assert auc_of(sharded) == pytest.approx(auc_of(plain), abs=2e-4)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_keras_learns_and_scores_new_rows(clicks: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    assert learned_and_scored(tmp_path, "keras", clicks) > 0.7


@pytest.mark.slow
@pytest.mark.limit(600)
def test_a_killed_training_goes_on_exactly(clicks: Path, tmp_path: Path) -> None:
    """With Keras on the same number of ranks, it ends with the weights of an uninterrupted training."""
    pytest.importorskip("tensorflow")
    words = ("--checkpoint-every", "5", "--epochs", "2")
    whole, saved = tmp_path / "whole", tmp_path / "saved"
    run(tmp_path, "keras", 2, clicks, *words, "--checkpoints", str(whole))
    each = 32_000 // (2 * BATCH)  # complete batches
    steps = each * 2
    for _ in range(2):
        job, output = begin(tmp_path, "keras", 2, clicks, *words, "--checkpoints", str(saved))
        goal = newest(saved) + 10
        assert wait_until(lambda goal=goal: newest(saved) >= goal, 90) is not None, output.read_text()
        kill(job)
    at = newest(saved)
    assert at < steps, "it must be killed before the end"
    text = run(tmp_path, "keras", 2, clicks, *words, "--checkpoints", str(saved))
    assert f"continuing after step {at}: epoch {at // each}" in text
    for ending in ("npz", "npz.npy"):
        pair = [np.load(item / f"checkpoint-{steps:08}.{ending}") for item in (whole, saved)]
        arrays = [{"table": tensor} if ending == "npz.npy" else dict(tensor) for tensor in pair]
        for name in arrays[0].keys() - {"position", "options", "arrays"}:
            np.testing.assert_allclose(arrays[1][name], arrays[0][name], rtol=1e-3, atol=1e-4, err_msg=name)
    more = run(tmp_path, "keras", 3, clicks, "--epochs", "3", "--checkpoints", str(saved))
    rest = 32_000 // (3 * BATCH)
    assert f"after step {steps + rest}: AUC" in more


def newest(directory: Path) -> int:
    """Return the step of the newest valid checkpoint: see Note [Manifests]."""
    newest = CheckpointFiles(directory, 2, "checkpoint", ".npz").find(None) if directory.is_dir() else None
    return newest.number if newest else 0
