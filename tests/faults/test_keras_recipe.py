"""The Keras recipe killed in mid-epoch, resumed with other numbers of ranks: each image once per epoch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_counts import contained, each_once

from ringdance import data, recipes

RECIPE = Path(recipes.__file__).parent / "resnet50"
IMAGES = 45

# The recipe itself, with a net that trains within a second. After DIE steps, rank 1 kills itself.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, {recipe!r})
import train_keras
import keras

def small(classes, image_size, width):
    images = keras.Input((image_size, image_size, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, 2, use_bias=False)(x))
    return keras.Model(images, keras.layers.Dense(classes, dtype="float32")(keras.layers.Flatten()(x)))

whole, left = train_keras.KerasImageModel.step, [int(os.environ["DIE"])]

def step(*words):
    if left[0] == 0 and train_keras.hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return whole(*words)

train_keras.resnet50, train_keras.KerasImageModel.step = small, step
train_keras.main()
"""


def run(directory: Path, name: str, ranks: int, die: int) -> subprocess.CompletedProcess[str]:
    """Train with `ranks` processes. The second one is killed after `die` steps, unless that is -1."""
    logs = directory / name
    logs.mkdir()
    words = (
        f"-m ringdance run -np {ranks} {sys.executable} script.py --preset laptop --data data --epochs 2 "
        f"--image-size 16 --batch-size 2 --checkpoints saved --checkpoint-every 2 --sample-log {name}"
    )
    return subprocess.run(
        [sys.executable, *words.split()], cwd=directory, env={**os.environ, "DIE": str(die)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_killed_with_two_ranks_then_with_three_it_ends_with_two(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    image = pytest.importorskip("PIL.Image")
    samples = []
    for number in range(IMAGES):
        file = io.BytesIO()
        image.fromarray(np.full((20, 20, 3), 5 * number, np.uint8)).save(file, "JPEG")
        samples.append((file.getvalue(), number % 2))
    data.write(tmp_path / "data", samples)
    (tmp_path / "script.py").write_text(SCRIPT.format(recipe=str(RECIPE)))
    first = run(tmp_path, "first", 2, 5)  # 12 steps per epoch: killed in the first epoch
    assert first.returncode, first.stdout
    second = run(tmp_path, "second", 3, 7)  # in the second epoch
    assert second.returncode, second.stdout
    assert "continuing after step" in second.stdout, second.stdout + second.stderr
    last = run(tmp_path, "last", 2, -1)
    assert last.returncode == 0, last.stdout + last.stderr
    assert f"of {IMAGES} images" in last.stdout
    counts = contained([tmp_path / name for name in ("first", "second", "last")])
    assert all(each_once(counts[epoch], IMAGES, 2 * 3) for epoch in range(2))
