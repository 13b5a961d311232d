"""The ResNet-50 recipe with torchvision: its weights fit torchvision's models, whose classifiers train."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchvision")

import torch
from torchvision import models

import ringdance.recipes.resnet50
import ringdance.torch as hvd
from ringdance.data import Batch

sys.path.insert(0, str(Path(ringdance.recipes.resnet50.__file__).parent))  # where a copy finds presets.py

import train_torch
from presets import PRESETS
from shared import begin_with

hvd.init()
GIVEN = {"accumulate": 1, "width": 64, "model": None, "seed": 0}


def training_of(name: str | None, classes: int = 5, size: int = 64) -> Any:
    preset = replace(PRESETS["laptop"], image_size=size)
    options = Namespace(**{**GIVEN, "model": name})
    return train_torch.TorchImageModel(options, preset, classes, torch.device("cpu"))


def test_a_state_dict_of_ours_is_one_of_theirs() -> None:
    torch.manual_seed(hvd.rank())
    ours, theirs = train_torch.resnet50(7, 64), models.resnet50(weights=None, num_classes=7)
    images = torch.rand(2, 3, 64, 64)
    for source, target in ((ours, theirs), (theirs, ours)):
        for item in source.modules():
            if isinstance(item, torch.nn.BatchNorm2d):
                torch.nn.init.uniform_(item.weight, 0.5, 1.5)  # some start at 0, but all branches must matter
                torch.nn.init.uniform_(item.running_mean)
        target.load_state_dict(source.state_dict())
        torch.testing.assert_close(target.eval()(images), source.eval()(images))


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "googlenet", "mobilenet_v3_small", "squeezenet1_1"])
def test_a_classifier_takes_a_step(name: str, tmp_path: Path) -> None:
    training = training_of(name)
    training.equal()
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    images = torch.from_numpy(np.random.RandomState(hvd.rank()).randint(0, 256, (4, 3, 64, 64), np.uint8))
    labels = torch.arange(4)
    training.step(Batch(images, labels, labels, 1.0, 8, 8), 0.1)
    figures = training.figures()
    assert np.isfinite(figures["loss"])
    pairs = zip(before, training.model.parameters(), strict=True)
    assert any(not torch.equal(value, two) for value, two in pairs)
    sums = hvd.allgather_object([float(item.detach().sum()) for item in training.model.parameters()])
    assert sums[0] == sums[1], "equal on all ranks"
    training.average_statistics()  # some models have no statistics
    training.restore(training.state())
    training.export(tmp_path)


def test_a_model_has_the_normalization_of_its_weights() -> None:
    assert training_of("resnet18").mean.flatten().tolist() == pytest.approx(train_torch.MEAN, abs=1e-3)
    assert training_of("efficientnet_v2_l").mean.flatten().tolist() == pytest.approx([127.5] * 3)


def test_what_does_not_fit_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"resnet19 is not a torchvision classifier\. .*resnet18"):
        training_of("resnet19")
    with pytest.raises(SystemExit, match="inception_v3 does not take images of 40 pixels"):
        training_of("inception_v3", size=40)
    path = Path(hvd.broadcast_object(str(tmp_path))) / "weights.pt"
    if hvd.rank() == 0:
        torch.save(models.resnet18(weights=None).state_dict(), path)
    options = Namespace(weights=str(path), evaluate=False)
    assert "except fc.weight, fc.bias" in begin_with(options, training_of("resnet18"), 5)
    with pytest.raises(SystemExit, match="not for this model"):
        begin_with(options, training_of("resnet34"), 5)
