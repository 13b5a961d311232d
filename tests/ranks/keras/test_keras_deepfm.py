"""The DeepFM recipe on TensorFlow: it learns, and sharded training equals replicated training."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ringdance.keras as hvd
from ringdance import recipes
from ringdance.data import Table, planted
from ringdance.data.tables.writing import TableWriter, write_index

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the recipe uses TensorFlow"),
    pytest.mark.every_backend(daily=True),
]

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROWS, CHECKED, TABLE, BATCH = 24_000, 4_000, 20_011, 512
STEPS = ROWS // (BATCH // SIZE * SIZE)  # complete batches only


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a directory shared by all ranks, with rows that have a planted signal."""
    path = Path(hvd.broadcast_object(str(tmp_path)))
    if RANK == 0:
        for split, count, day in (("train", ROWS, 0), ("validation", CHECKED, 1)):
            with TableWriter(path / f"{split}.npy", "rows", count, 39) as file:
                for part in planted(count, day=day):
                    file.write(part.rows(TABLE))
            write_index(path, split, "rows", 39, TABLE, [file.written])
    hvd.broadcast_object(None)
    return path


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(recipes.__file__).parent / "deepfm"))
    others = {name: sys.modules.pop(name, None) for name in ("train_keras", "loop")}  # may be ResNet-50's
    module = importlib.import_module("train_keras")
    monkeypatch.setattr(module.loop.hvd, "shutdown", lambda: None)
    yield module
    for name, other in others.items():
        del sys.modules[name]
        if other is not None:
            sys.modules[name] = other


def run(recipe: Any, monkeypatch: pytest.MonkeyPatch, data: Path, name: str, words: str) -> Path:
    line = (
        f"{data} --dim 4 --hidden 16 --batch-size {BATCH // SIZE} --table-rate 0.1 --rate 0.01 --warmup 5 "
        f"--scale-rate 0 --checkpoints {data / name} {words}"
    )
    monkeypatch.setattr(sys, "argv", ["train_keras.py", *line.split()])
    recipe.loop.main(recipe.__doc__, recipe.KerasTableModel, hvd.init)
    hvd.broadcast_object(None)
    return data / name


def final(directory: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return position and arrays of the newest checkpoint."""
    path = max(directory.glob("checkpoint-*.npz"))
    with np.load(path) as saved:
        names = sorted({*saved.files} - {"position", "options", "arrays"})
        arrays = [saved[name] for name in names]
        position: dict[str, Any] = json.loads(str(saved["position"]))
    return position, [*arrays, np.load(path.with_name(f"{path.name}.npy"))]


def test_parts_of_a_sharded_training_are_the_whole_of_a_replicated_one(
    recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, arrays = final(run(recipe, monkeypatch, data, "whole", f"--export {data / 'model'}"))
    run(recipe, monkeypatch, data, "parts", "--sharded --steps 13")
    assert final(data / "parts")[0]["done"] == 13 * (BATCH // SIZE * SIZE)
    position, others = final(run(recipe, monkeypatch, data, "parts", "--sharded"))
    assert (position["step"], position["epoch"], position["done"]) == (STEPS, 1, 0)
    for actual, other in zip(arrays, others, strict=True):
        np.testing.assert_allclose(actual, other, rtol=2e-2, atol=2e-3)
    assert expected["best"] > 0.65, "no signal: 0.5; the best possible: 0.89"
    assert position["best"] == pytest.approx(expected["best"], abs=5e-4)
    if RANK == 0:
        assert "continuing after step 13" in capsys.readouterr().out
    hvd.broadcast_object(None)
    scores = hvd.BinaryScores()
    if RANK == 0:
        scores.add(*scored(data))
    assert scores.result()["auc"] == pytest.approx(expected["best"], abs=1e-5)


def scored(data: Path) -> tuple[Any, Any]:
    """Score the validation rows with the exported files only. Return probabilities and labels."""
    import tensorflow as tf

    rows = Table.open(data, "validation").read(np.arange(CHECKED))
    keys, places = np.unique(rows.ids, return_inverse=True)
    table = np.load(data / "model" / "table.npy")[0][keys]
    layers = tf.saved_model.load(str(data / "model" / "layers"))  # keep it: it owns the variables
    logits = layers.serve(table, places.reshape(rows.ids.shape), rows.values).numpy()
    return 1 / (1 + np.exp(-logits.astype(np.float64))), rows.labels
