"""LARS in NumPy, as the paper has it (You et al. 2017): what the recipe's optimizers are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def step(
    weights: list[Array], gradients: list[Array], velocities: list[Array], rate: float, momentum: float,
    decay: float,
) -> None:
    """Update weights and velocities in place. Arrays of one dimension neither adapt nor decay."""
    for w, g, v in zip(weights, gradients, velocities, strict=True):
        trust = 1.0
        if w.ndim > 1:
            norm, slope = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
            if norm > 0 and slope > 0:
                trust = 0.001 * norm / (slope + decay * norm)
            g = g + decay * w
        v *= momentum
        v += rate * trust * g
        w -= v
