"""Compute the area under the ROC curve from counts per score, which can be merged across ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def counted(scores: Array, positive: Array) -> tuple[Array, Array]:
    """Return the sorted distinct scores, and each one's positive and negative count, shape (n, 2)."""
    values, places = np.unique(scores, return_inverse=True)
    counts = [np.bincount(places[mask], minlength=len(values)) for mask in (positive, ~positive)]
    return values, np.stack(counts, 1)


def won_twice(counts: Array) -> int:
    """Return twice the number of correctly ordered (positive, negative) pairs. A tie counts as half a pair.

    Args:
        counts: Number of positive and negative samples per score, in ascending order, shape (n, 2).
    """
    positive, negative = counts[:, 0], counts[:, 1]
    return int((positive * (2 * (np.cumsum(negative) - negative) + negative)).sum())


def auc(scores: Array, labels: Array) -> float:
    """Return the area under the ROC curve (Mann and Whitney 1947), or NaN if all labels are equal."""
    counts = counted(scores, np.asarray(labels) > 0.5)[1]
    positives, negatives = counts.sum(0).tolist()
    return won_twice(counts) / (2 * positives * negatives) if positives and negatives else math.nan


def standard_error(area: float, positives: int, negatives: int) -> float:
    """Return the standard error of an estimated area (Hanley and McNeil 1982), given the sample counts."""
    if not positives or not negatives:
        return math.nan
    both, one = area / (2 - area), 2 * area**2 / (1 + area)
    spread = (positives - 1) * (both - area**2) + (negatives - 1) * (one - area**2)
    return math.sqrt(max(0.0, area * (1 - area) + spread) / (positives * negatives))
