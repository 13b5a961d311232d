"""`ringdance bench input` for a script on two ranks, which is slow in its input or in its step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks, environment, put_files
from sampled import drawn, sampled

PARENT = {"prepare": "data", "copy": "recipes"}
SCRIPT = """
import sys, time
import numpy as np
import ringdance.numpy as hvd
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader

class Slow(BaseDataLoader):
    def __len__(self):
        return 4
    def _iterate(self):
        for number in range(4):
            time.sleep(LOAD)
            yield {"image": np.ones((8, 3)), "label": np.ones(8)}

class Ahead(AsyncDataLoaderMixin, Slow): pass

LOAD, STEP = float(sys.argv[1]), float(sys.argv[2])
hvd.init()
loader = hvd.watch_input(Ahead(2))
for epoch in range(1000):
    for batch in loader:
        time.sleep(STEP * (1 + hvd.rank()))
        hvd.allreduce(batch["image"], "gradients")
print("has trained")
"""


KERAS = """
import sys, time
import keras, numpy as np
import ringdance.keras as hvd

class Slow(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        time.sleep(float(sys.argv[1]))
        return np.ones((8, 3)), np.ones((8, 1))

hvd.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(hvd.watch_input(Slow()), epochs=1000, verbose=0)
"""


@pytest.mark.parametrize("bound", sampled("what bench input finds", ["loader", "step"], 1))
def test_which_waits_for_which(bound: str, tmp_path: Path) -> None:
    load, step = (0.04, 0.001) if bound == "loader" else (0.001, 0.04)
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ["bench", "input", "-np", "2", "--seconds", "0.5", "--json", "--"]
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", *line, "python", "train.py", str(load), str(step)],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    speeds = {part: report[part]["samples_per_second"] for part in ("loader", "step", "both")}
    assert min(speeds["loader"], speeds["step"]) == speeds[bound]
    assert speeds["both"] > 0
    # If other programs run, it may report too few cores or an unclear cause: tests/unit/tools/test_bench.py.
    assert report["bound"] in (bound, "cores", "order", "unclear")
    assert report["sentence"]


@pytest.mark.slow
@pytest.mark.limit(200)
def test_what_fit_reads_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    (tmp_path / "train.py").write_text(KERAS)
    line = ["bench", "input", "-np", "2", "--seconds", "1", "--json", "--", "python", "train.py", "0.2"]
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", *line],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bound"] == "loader"


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_recipe_is_measured_as_the_tutorial_shows(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    page = ROOT / "docs" / "tutorials" / "imagenet.md"
    put_files(page, tmp_path)
    for line in ("python photos.py", "prepare imagenet photos small -np 1", "copy resnet50 job"):
        words = line.split()
        command = words if words[0] == "python" else ["ringdance", PARENT[words[0]], *words]
        subprocess.run(command, cwd=tmp_path, env=environment(), check=True, timeout=100)
    shown = [block for block in blocks(page) if block.language == "console"]
    command = next(line for block in shown for line, _ in block.commands() if "bench input" in line)
    command = command.replace("input -np 2", "input -np 2 --seconds 1 --json")
    if framework == "tensorflow":
        command = command.replace("train_torch.py", "train_keras.py").replace(" --width 8", "")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert all(report[part]["samples_per_second"] > 0 for part in ("loader", "step", "both"))


PLANTED = """
import fcntl, sys, time
import numpy as np
import ringdance.numpy as hvd

CAUSE, SECONDS = sys.argv[1], float(sys.argv[2])
hvd.init()

def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

class Loader:
    def __iter__(self):
        for number in range(50):
            slow = SECONDS if CAUSE not in ("slow rank", "busy rank") or hvd.rank() == 1 else 0.0
            if CAUSE in ("disk", "slow rank"):
                time.sleep(slow)
            elif CAUSE in ("decoding", "busy rank"):
                spin(slow)
            elif CAUSE == "shuffling":
                until = time.process_time() + SECONDS
                while time.process_time() < until:
                    np.random.default_rng(number).permutation(5000)
            elif CAUSE == "lock":
                with open("lock", "w") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    time.sleep(SECONDS / 2)
            yield np.ones(8 if CAUSE != "small batch" else 1)

loader = hvd.watch_input(Loader())
for epoch in range(100000):
    for batch in loader:
        time.sleep({"none": SECONDS, "small batch": 0.0}.get(CAUSE, SECONDS / 20))
        hvd.allreduce(np.ones(3), "gradients")
"""
RIGHT = {  # words of the advice, one of which must appear
    "slow rank": ("Rank 1 holds the others up", "and waits"),
    "busy rank": ("Rank 1 holds the others up", "and computes"),
    "disk": ("The loader waits most of the time",),
    "lock": ("The loader waits most of the time",),
    "decoding": ("keeps a rank's cores busy",),
    "shuffling": ("keeps a rank's cores busy",),
    "small batch": ("The input is not the limit",),
    "none": ("The input is not the limit",),
    "other programs": ("Other programs use",),
    "disk, other programs": ("The loader waits most of the time",),
    "slow rank, other programs": ("Rank 1 holds the others up", "and waits"),
}


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("seconds", drawn("planted seconds", [0.008, 0.015, 0.03, 0.05, 0.08], 2))
@pytest.mark.parametrize("cause", RIGHT)
def test_a_planted_cause_is_named_or_nothing_is(cause: str, seconds: float, tmp_path: Path) -> None:
    """On a busy machine, or if the noise is large, it reports that the cause is unclear."""
    (tmp_path / "train.py").write_text(PLANTED)
    cause, others_run = cause.removesuffix(", other programs"), "other programs" in cause
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)] if others_run else []
    try:
        line = ["bench", "input", "-np", "2", "--seconds", "1.5", "--json", "--"]
        done = subprocess.run(
            [sys.executable, "-m", "ringdance", *line, "python", "train.py", cause, str(seconds)],
            cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=100,
        )  # fmt: skip
    finally:
        for process in others:
            process.kill()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    said = f"{report['sentence']} {report['next_step']}"
    speeds = {part: report[part]["samples_per_second"] for part in ("loader", "step")}
    if others_run and cause in ("disk", "slow rank") and speeds["loader"] < speeds["step"] / 2:
        assert "Other programs" not in said, said  # they do not mask what barely uses a core
    assert report["bound"] == "unclear" or all(words in said for words in RIGHT[cause]), said
    assert "--resize" not in said


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('no data')\nsys.exit(3)\n")
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", "bench", "input", "-np", "2", "--", "python", "train.py"],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 3
    assert "loader alone failed with exit code 3" in done.stderr
    assert "[0] no data" in done.stderr
