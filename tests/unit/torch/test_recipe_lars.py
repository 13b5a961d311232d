"""LARS in the resnet50 recipe with PyTorch, compared with NumPy's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from lars_reference import step
from torch import nn

import ringdance.recipes.resnet50


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(ringdance.recipes.resnet50.__file__).parent))
    return importlib.import_module("train_torch")


def test_it_computes_what_the_paper_says(recipe: Any) -> None:
    torch.manual_seed(3)
    shapes = [(4, 3, 3, 3), (4,), (5, 4), (2, 2)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    with torch.no_grad():
        parameters[3].zero_()  # its norm is zero, so it is not adapted
    arrays = [parameter.detach().double().numpy().copy() for parameter in parameters]
    velocities = [np.zeros_like(array) for array in arrays]
    optimizer = recipe.LARS([{"params": parameters, "weight_decay": 1e-2}], momentum=0.9)
    for number in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if number == 2:
            parameters[2].grad.zero_()
        optimizer.param_groups[0]["lr"] = rate = 2.0 / (number + 1)
        gradients = [parameter.grad.double().numpy() for parameter in parameters]
        step(arrays, gradients, velocities, rate, 0.9, 1e-2)
        optimizer.step()
        for parameter, array in zip(parameters, arrays, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), array, rtol=2e-5, atol=1e-7)
    assert set(optimizer.state_dict()["state"][0]) == {"momentum_buffer"}


def test_norms_and_biases_do_not_decay(recipe: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    decays, others = recipe.parameter_groups(model, 0.1)
    assert [list(parameter.shape) for parameter in decays["params"]] == [[4, 3, 3, 3], [2, 4]]
    assert [list(parameter.shape) for parameter in others["params"]] == [[4], [4], [2]]
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
