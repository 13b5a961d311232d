"""The ResNet-50 recipe on two ranks with a small net: stopped in mid-epoch, resumed, evaluated."""

from __future__ import annotations

import importlib
import io
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from sample_counts import contained, each_once

import ringdance.keras as hvd
from ringdance import data, recipes

image = pytest.importorskip("PIL.Image")

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
IMAGES = 8 * SIZE + 3  # two steps per epoch, and three images are left out


def small(classes: int, image_size: int, width: int) -> Any:
    images = keras.Input((image_size, image_size, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.Conv2D(8, 3, 2, use_bias=False)(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return keras.Model(images, keras.layers.Dense(classes, dtype="float32")(keras.layers.Flatten()(x)))


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(recipes.__file__).parent / "resnet50"))
    module = importlib.import_module("train_keras")
    monkeypatch.setattr(module, "resnet50", small)
    policy = keras.config.dtype_policy()
    yield module
    keras.config.set_dtype_policy(policy)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a directory shared by all ranks, with a data set in which the color determines the class."""
    directory = Path(hvd.broadcast_object(str(tmp_path)))
    if RANK == 0:
        samples = []
        for number in range(IMAGES):
            file = io.BytesIO()
            image.new("RGB", (24, 24), (80 * (number % 3), 255 - 9 * number, 40)).save(file, "JPEG")
            samples.append((file.getvalue(), number % 3))
        data.write(directory / "data", samples)
    hvd.broadcast_object(None)
    return directory


def run(recipe: Any, monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, *words: str) -> None:
    (directory / name).mkdir(exist_ok=True)
    line = (
        f"--preset laptop --data {directory / 'data'} --image-size 16 --batch-size 4 --epochs 2 --rate 0.05 "
        f"--checkpoints {directory / name} --checkpoint-every 2 --keep 9 --sample-log {directory / name}"
    )
    monkeypatch.setattr(sys, "argv", ["train_keras.py", *line.split(), *words])
    recipe.main()
    hvd.broadcast_object(None)


def final(directory: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return state and variables of the newest checkpoint."""
    return read(max(directory.glob("checkpoint-*")))


def read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    with np.load(path) as saved:
        names = [name for name in saved.files if name not in ("position", "options", "arrays")]
        return json.loads(str(saved["position"])), [saved[name] for name in names]


def test_a_run_that_was_stopped_in_mid_epoch_ends_as_an_unbroken_one(
    recipe: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe, monkeypatch, photos, "whole")
    told = capsys.readouterr().out
    run(recipe, monkeypatch, photos, "parts", "--steps", "1")
    assert final(photos / "parts")[0]["done"] == 4 * SIZE
    run(recipe, monkeypatch, photos, "parts", "--price-per-hour", "3600")
    state, variables = final(photos / "parts")
    expected, others = final(photos / "whole")
    assert (state["step"], state["epoch"], state["done"]) == (4, 2, 0)
    assert expected["step"] == 4
    for actual, other in zip(variables, others, strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-3, atol=1e-5)
    for name in ("whole", "parts"):
        counts = contained([photos / name])
        assert all(each_once(counts[epoch], IMAGES, 4 * SIZE) for epoch in range(2)), name
    if RANK == 0:
        assert told.count(f"on {IMAGES} training images (the data has no other split)") == 2
        again = capsys.readouterr().out
        assert "continuing after step 1" in again
        assert again.count("after epoch") == 2, "no evaluation in mid-epoch"
        assert "top-5" not in again, "there are three classes"
    run(recipe, monkeypatch, photos, "parts", "--evaluate")
    if RANK == 0:
        figures = [line.rpartition(",")[0] for line in again.splitlines() if ": top-1" in line]
        assert figures[-1] in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"optimizer was sgd, now lars.*accumulate was 1, now 2"):
        run(recipe, monkeypatch, photos, "parts", "--optimizer", "lars", "--accumulate", "2")


def test_a_model_of_keras_applications_exported_and_loaded_again(
    recipe: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--model MobileNetV2 --image-size 32 --epochs 2"
    model = photos / "model"
    run(recipe, monkeypatch, photos, "library", *words.split(), "--export", str(model))
    told = capsys.readouterr().out
    again = f"{words} --evaluate --checkpoints= --weights {model / 'model.weights.h5'}"
    run(recipe, monkeypatch, photos, "library", *again.split())
    if RANK == 0:
        figures = told.partition("after epoch 2: ")[2].partition(" on")[0]
        assert f"before any training: {figures}" in capsys.readouterr().out
        right = 0
        program = keras.models.load_model(model / "model.keras", compile=False)
        checks = data.Loader(data.Dataset.open(photos / "data"), 4, image_size=32, augment=False)
        for batch in checks:
            shares = program.predict_on_batch(batch.images)
            np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-4)
            right += int((shares.argmax(axis=1) == batch.labels).sum())
        assert figures == f"top-1 {right / IMAGES:.2%}"
        options = Namespace(model="MobileNetV2", accumulate=1, seed=0)
        preset = replace(recipe.PRESETS["laptop"], image_size=32)
        other = recipe.KerasImageModel(options, preset, 5)
        assert other.load_weights(str(model / "model.weights.h5")) == ["predictions/kernel"]
        norms = [layer for layer in other.body().layers if isinstance(layer, keras.layers.BatchNormalization)]
        assert {norm.momentum for norm in norms} == {0.9}, "short trainings need another momentum"
        other = recipe.KerasImageModel(Namespace(model="MobileNet", accumulate=1, seed=0), preset, 3)
        with pytest.raises(ValueError, match="layers"):
            other.load_weights(str(model / "model.weights.h5"))
    hvd.broadcast_object(None)


def test_lars_with_accumulation_in_half_precision(
    recipe: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--optimizer lars --rate 5 --batch-size 2 --accumulate 2 --precision float16 --evaluate-every 2"
    run(recipe, monkeypatch, photos, "half", *words.split())
    state, variables = final(photos / "half")
    assert state["step"] == 4
    assert each_once(contained([photos / "half"])[1], IMAGES, 4 * SIZE)
    assert all(np.isfinite(variable).all() for variable in variables)
    before = read(min((photos / "half").glob("checkpoint-*")))[1]  # after two steps
    assert np.abs(variables[0] - before[0]).max() > 1e-4, "the scaled loss reaches the weights"
    if RANK == 0:
        assert capsys.readouterr().out.count("after epoch") == 1
