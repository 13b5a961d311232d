"""LARS in NumPy, as defined in the paper (You et al. 2017): the reference for the recipe's optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def step(
    weights: list[Array], gradients: list[Array], velocities: list[Array], rate: float, momentum: float,
    decay: float,
) -> None:
    """Update weights and velocities in place. One-dimensional arrays are neither adapted nor decayed."""
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
