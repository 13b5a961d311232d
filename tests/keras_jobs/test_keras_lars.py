"""LARS: the paper's formulas, exclusions, and the gradients of all ranks in DistributedOptimizer."""

from __future__ import annotations

from typing import Any

import keras
import lars_reference
import numpy as np
import pytest

import ringdance.keras as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def filled(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.every_backend
def test_three_steps_equal_numpy_on_the_mean_of_the_ranks() -> None:
    start = [*filled((3, 3, 2, 4), (4,), (5, 2)), np.zeros((2, 2), "float32")]  # zeros: no trust ratio
    variables = [keras.Variable(one, name=f"v{number}") for number, one in enumerate(start)]
    made = hvd.LARS(0.5, momentum=0.8, weight_decay=1e-2, trust_coefficient=0.1, epsilon=1e-4)
    optimizer = hvd.DistributedOptimizer(made)
    weights, velocities = [one.astype(float) for one in start], [np.zeros(one.shape) for one in start]
    for number in range(3):
        rate = 0.5 / (number + 1)  # the rate of each step is in its velocity, as in the paper
        optimizer.learning_rate = rate
        by_rank = [filled(*(one.shape for one in start), seed=10 * number + rank + 1) for rank in range(SIZE)]
        gradients = [keras.ops.convert_to_tensor(one) for one in by_rank[RANK]]
        optimizer.apply(gradients, variables)
        mean = [np.mean(each, axis=0) for each in zip(*by_rank, strict=True)]
        lars_reference.step(weights, mean, velocities, rate, 0.8, 1e-2, 0.1, 1e-4)
    for variable, expected in zip(variables, weights, strict=True):
        found = keras.ops.convert_to_numpy(variable.value)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_excluded_variables_are_those_of_momentum_sgd() -> None:
    start, slope = filled((4, 4), (4, 4), seed=3)
    variables = [keras.Variable(start, name=name) for name in ("kernel", "embedding")]
    optimizer = hvd.LARS(0.1, momentum=0.9, weight_decay=1.0, exclude=("embedding",))
    optimizer.apply([keras.ops.convert_to_tensor(slope)] * 2, variables)
    found = [keras.ops.convert_to_numpy(one.value) for one in variables]
    np.testing.assert_allclose(found[1], start - 0.1 * slope, rtol=1e-6)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_its_arguments_are_saved() -> None:
    made = hvd.LARS(0.25, 0.8, 1e-4, 0.01, 1e-9, exclude=("gamma",), gradient_accumulation_steps=2)
    config = made.get_config()
    assert hvd.LARS.from_config(config).get_config() == config
    assert config["weight_decay"] == 1e-4
