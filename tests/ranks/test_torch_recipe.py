"""A step of the recipe on all ranks is the step of one process on the whole batch."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import ringdance.recipes.resnet50
import ringdance.torch as hvd
from ringdance.data import Batch
from ringdance.data.order import block

sys.path.insert(0, str(Path(ringdance.recipes.resnet50.__file__).parent))  # where a copy finds presets.py

import train_torch
from presets import PRESETS

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
RATE = 0.1


@pytest.mark.parametrize(("passes", "count"), [(3, 7), (2, 1)])
def test_short_batches_and_passes_are_weighted(passes: int, count: int) -> None:
    """Of 7 images the ranks have unequally many, some fewer than passes; of 1 all but one have padding."""
    torch.manual_seed(RANK)
    preset = replace(PRESETS["laptop"], momentum=0.0, weight_decay=0.0, label_smoothing=0.1)
    given = Namespace(accumulate=passes, width=4, checkpoints=None, keep=1)
    training = train_torch.Training(given, preset, 5, torch.device("cpu"))
    for one in training.model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.ones_(one.weight)  # else gradients of most layers are 0
    training.restore()
    training.model.eval()  # normalization by the statistics of a batch is of each rank's own
    twin = copy.deepcopy(training.model)

    random = np.random.RandomState(3)
    images = torch.from_numpy(random.randint(0, 256, (count, 3, 40, 40), np.uint8))
    labels = torch.from_numpy(random.randint(0, 5, count))
    start, stop = block(count, RANK, SIZE)
    mine = slice(start, stop) if stop > start else slice(0, 1)
    batch = Batch(images[mine], labels[mine], labels[mine], (stop - start) * SIZE / count, count, count)
    training.step(batch, RATE)

    logits = twin((images.float() - training.mean) / training.deviation)
    nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).backward()
    for (name, one), other in zip(training.model.named_parameters(), twin.parameters(), strict=True):
        assert other.grad.abs().max() > 0, name
        expected = other.detach() - RATE * other.grad
        scale = float((RATE * other.grad).abs().max())
        torch.testing.assert_close(one.detach(), expected, rtol=1e-5, atol=1e-3 * scale, msg=name)
