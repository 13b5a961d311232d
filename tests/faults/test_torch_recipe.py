"""The recipe killed in mid-epoch, resumed with other numbers of ranks: each sample once per epoch."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from processes import Job, needed, start, wait_until
from sample_counts import each_once

import ringdance.recipes.resnet50

PIL = pytest.importorskip("PIL.Image")
needed("torch")

RECIPE = Path(ringdance.recipes.resnet50.__file__).with_name("train_torch.py")
IMAGES, EPOCHS, BATCH, EVERY = 202, 3, 4, 2


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data set of small JPEGs."""
    root = tmp_path_factory.mktemp("images")
    for number in range(IMAGES):
        path = root / f"src/n{number % 3:08}/{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 256, (40, 40, 3), np.uint8)
        PIL.fromarray(pixels).save(path)
    command = [sys.executable, "-m", "ringdance", "data", "prepare", "imagenet", f"{root}/src", f"{root}/set"]
    subprocess.run([*command, "--shards", "2"], check=True, timeout=60, capture_output=True)
    return root / "set"


def begin(directory: Path, images: Path, ranks: int, name: str) -> tuple[Job, Path, Path]:
    """Start a run. Return it, the directory with its record of samples, and its output file."""
    record, output = directory / name, directory / f"{name}.txt"
    record.mkdir()
    with output.open("wb") as file:
        job = start(
            directory / f"job-{name}", "-np", str(ranks), sys.executable, str(RECIPE),
            "--preset", "laptop", "--data", str(images), "--epochs", str(EPOCHS), "--image-size", "48",
            "--batch-size", str(BATCH), "--evaluate-every", "0", "--checkpoints", str(directory / "saved"),
            "--checkpoint-every", str(EVERY), "--sample-log", str(record), "--width", "4", "--threads", "1",
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return job, record, output


def latest(directory: Path) -> int:
    """Return the step of the newest checkpoint."""
    steps = [int(path.name.rpartition("-")[2]) for path in directory.glob("saved/checkpoint-*")]
    return max(steps, default=0)


def kill(job: Job) -> None:
    """Kill the ranks and the processes that started them, all at once."""
    everything = [psutil.Process(job.process.pid), *job.processes()]
    for process in everything:
        try:
            process.suspend()
        except psutil.Error:
            continue
    for process in everything:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    job.process.wait()
    assert wait_until(lambda: not job.processes(), 20) is not None, job.leftovers()


def kill_after(job: Job, directory: Path, step: int, output: Path) -> None:
    """Kill a run as soon as there is a checkpoint of that step or a later one."""
    wait_until(lambda: latest(directory) >= step or job.process.poll() is not None, 300)
    assert job.process.poll() is None, output.read_text()
    assert latest(directory) >= step, "no checkpoint in 300 s"
    kill(job)


def used(record: Path, first: int, last: int | None) -> list[dict[str, object]]:
    """Return the ranks' records for steps ``first`` + 1 to ``last``."""
    lines = [line for path in record.glob("rank-*.jsonl") for line in path.read_text().splitlines(True)]
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [item for item in whole if item["step"] > first and (last is None or item["step"] <= last)]


@pytest.mark.slow
def test_each_sample_counts_once_in_an_epoch(tmp_path: Path, images: Path) -> None:
    counted: list[dict[str, object]] = []
    step = 0
    # An epoch takes 26 steps on 2 ranks and 17 on 3, so both kills come in mid-epoch.
    for number, (ranks, until) in enumerate([(2, 30), (3, 52), (2, None)]):
        job, record, output = begin(tmp_path, images, ranks, f"run{number}")
        try:
            if until is None:
                assert job.process.wait(300) == 0, output.read_text()
            else:
                kill_after(job, tmp_path, until, output)
        finally:
            job.end()
        if number:
            resumed = re.search(r"continuing after step (\d+): epoch (\d+), (\d+) of ", output.read_text())
            assert resumed, output.read_text()
            assert int(resumed[1]) == step
            assert 0 < int(resumed[3]) < IMAGES, "not in mid-epoch"
        contained = latest(tmp_path)
        counted += used(record, step, contained)
        step = contained

    for epoch in range(EPOCHS):
        samples = Counter(sample for line in counted if line["epoch"] == epoch for sample in line["samples"])
        assert each_once(samples, IMAGES, 2 * BATCH), f"epoch {epoch}"
    steps = {line["step"] for line in counted}
    assert steps == set(range(1, step + 1))
