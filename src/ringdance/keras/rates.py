"""Change the learning rate during training, and correct the momentum accordingly."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringdance.keras.library import number, variables_of


def set_learning_rate(optimizer: Any, rate: float, momentum_correction: bool = True) -> None:
    """Set an optimizer's learning rate and adjust its momentum.

    In Keras, the velocity includes the learning rate: ``v = momentum * v - rate * g``. If the rate is divided
    by ten without correction, steps are ten times too large until the old velocity has decayed. PyTorch needs
    no correction, because it multiplies the velocity by the rate. Source: Goyal et al. 2017, arXiv
    1706.02677, remark 2.

    Args:
        optimizer: A compiled or uncompiled optimizer, or a ``LossScaleOptimizer``.
        rate: The new learning rate.
        momentum_correction: If True and the optimizer has ``momentum``, multiply its velocities by the ratio
            of the new rate to the old rate.
    """
    old = number(optimizer.learning_rate)
    if np.float32(rate) == np.float32(old):  # Keras stores the rate as float32.
        return
    optimizer.learning_rate = rate
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if momentum_correction and old and hasattr(inner, "momentum"):
        for velocity in _velocities(inner):
            velocity.assign(velocity * (rate / old))


def _velocities(optimizer: Any) -> list[Any]:
    for name in ("momentums", "_momentums"):  # SGD, RMSprop
        if velocities := getattr(optimizer, name, None):
            return list(velocities)
    # Legacy optimizers of Keras 2.
    return [variable for variable in variables_of(optimizer) if "/momentum" in variable.name]
