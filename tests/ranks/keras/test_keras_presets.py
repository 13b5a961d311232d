"""A preset is one algorithm: from equal weights, Keras and PyTorch agree through warm-up and decay."""

from __future__ import annotations

import importlib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from sampled import sampled_rows

import ringdance.keras as hvd
from ringdance import recipes
from ringdance.data import Batch

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
STEPS, BATCH, CLASSES, PIXELS = 200, 16, 3, 8


def keras_net(classes: int, image_size: int, width: int) -> Any:
    images = keras.Input((image_size, image_size, 3), dtype="uint8")
    x = keras.layers.Normalization(mean=(123.675, 116.28, 103.53), variance=(3410.0, 3262.7, 3291.9))(images)
    y = keras.layers.Conv2D(4, 3, use_bias=False)(x)
    y = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(y)
    y = keras.layers.Activation("tanh")(y)  # a kink would amplify rounding errors to different weights
    y = keras.layers.GlobalAveragePooling2D()(y)
    return keras.Model(images, keras.layers.Dense(classes, dtype="float32")(y))


def torch_net(classes: int, width: int) -> Any:
    nn = importlib.import_module("torch").nn
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, classes),
    )


def as_torch(weights: list[Any]) -> list[Any]:
    """Return weights of Keras layers, in the same order, in PyTorch's layouts."""
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
    return [np.transpose(weight, axes[weight.ndim]) for weight in weights]


@pytest.mark.parametrize(("name", "optimizer", "rate"), sampled_rows("presets", [
    ("32", "sgd", 0.1), ("mlperf-4096", "lars", 0.5),
], 1))
def test_200_steps_of_a_preset_are_those_of_pytorch(
    name: str, optimizer: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(recipes.__file__).parent / "resnet50"))
    by_keras, by_torch = importlib.import_module("train_keras"), importlib.import_module("train_torch")
    shared = importlib.import_module("shared")
    monkeypatch.setattr(by_keras, "resnet50", keras_net)
    monkeypatch.setattr(by_torch, "resnet50", torch_net)
    preset = replace(
        by_torch.PRESETS[name], schedule="step", milestones=(6, 8), warmup_epochs=2, warmup_start=0.01,
        epochs=10, image_size=PIXELS, precision="float32",
    )
    assert preset.optimizer == optimizer
    options = Namespace(rate=rate, accumulate=1, width=0, model=None, seed=0)
    keras.utils.set_random_seed(0)
    other = by_keras.KerasImageModel(options, preset, CLASSES)
    model = other.model
    training = by_torch.TorchImageModel(options, preset, CLASSES, torch.device("cpu"))
    start = as_torch([keras.ops.convert_to_numpy(variable.value) for variable in model.trainable_variables])
    with torch.no_grad():
        for parameter, value in zip(training.model.parameters(), start, strict=True):
            parameter.copy_(torch.from_numpy(value.copy()))
    schedule = shared.schedule_of(preset, options, STEPS // 10 * BATCH * SIZE, BATCH * SIZE)
    random = np.random.RandomState(RANK)
    for step in range(STEPS):
        labels = random.randint(0, CLASSES, BATCH)
        noise = random.randint(0, 90, (BATCH, PIXELS, PIXELS, 3))
        images = (noise + 80 * labels[:, None, None, None]).astype(np.uint8)
        current = schedule(step / (STEPS // 10))
        assert current > 0
        batch = Batch(images, labels, labels, 1.0, 0, BATCH * SIZE)
        other.step(batch, current)
        channels_first = torch.from_numpy(np.moveaxis(images, 3, 1).copy())
        training.step(replace(batch, images=channels_first, labels=torch.from_numpy(labels)), current)
    result = as_torch([keras.ops.convert_to_numpy(variable.value) for variable in model.trainable_variables])
    expected = [parameter.detach().numpy() for parameter in training.model.parameters()]
    moved = max(float(np.abs(item - first).max()) for item, first in zip(expected, start, strict=True))
    apart = max(float(np.abs(actual - other).max()) for actual, other in zip(result, expected, strict=True))
    print(f"{name}: moved {moved:.4f}, apart {apart:.2e}")
    assert moved > 0.1
    assert apart < 1e-3
