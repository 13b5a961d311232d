"""A learning rate that changes in mid-training, with the momentum that goes with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringdance.keras.library import number, variables_of


def set_learning_rate(optimizer: Any, rate: float, momentum_correction: bool = True) -> None:
    """Set an optimizer's learning rate; its momentum continues at the new one.

    Keras's velocity contains the rate: ``v = momentum * v - rate * g``. Without correction the steps after a
    tenfold decay of the rate are ten times too long, and fade with the momentum; PyTorch, where the rate
    multiplies the velocity, has nothing to correct. Source: Goyal et al. 2017, arXiv 1706.02677, remark 2.

    Args:
        optimizer: compiled or not, also a ``LossScaleOptimizer``.
        rate: the new one.
        momentum_correction: multiply the velocities by new/old rate, of optimizers with ``momentum``.
    """
    old = number(optimizer.learning_rate)
    if np.float32(rate) == np.float32(old):  # which is kept in 32 bits
        return
    optimizer.learning_rate = rate
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if momentum_correction and old and hasattr(inner, "momentum"):
        for one in _velocities(inner):
            one.assign(one * (rate / old))


def _velocities(optimizer: Any) -> list[Any]:
    for name in ("momentums", "_momentums"):  # of SGD, RMSprop
        if found := getattr(optimizer, name, None):
            return list(found)
    return [one for one in variables_of(optimizer) if "/momentum" in one.name]  # Keras 2's legacy ones
