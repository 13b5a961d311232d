"""The area under the ROC curve, computed from counts per score. Counts from several ranks can be merged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def counted(scores: Array, positive: Array) -> tuple[Array, Array]:
    """Return the distinct scores in ascending order, and their positive and negative counts, shape (n, 2)."""
    values, places = np.unique(scores, return_inverse=True)
    counts = [np.bincount(places[mask], minlength=len(values)) for mask in (positive, ~positive)]
    return values, np.stack(counts, 1)


def won_twice(counts: Array) -> int:
    """Return twice the number of pairs in which the positive sample has the higher score. A tie counts half.

    Args:
        counts: Number of positive and negative samples per score, in ascending order, shape (n, 2).
    """
    positive, negative = counts[:, 0], counts[:, 1]
    return int((positive * (2 * (np.cumsum(negative) - negative) + negative)).sum())


def auc(scores: Array, labels: Array) -> float:
    """Return the area under the ROC curve (Mann and Whitney 1947), or NaN unless both labels occur."""
    counts = counted(scores, np.asarray(labels) > 0.5)[1]
    positives, negatives = counts.sum(0).tolist()
    return won_twice(counts) / (2 * positives * negatives) if positives and negatives else math.nan


def standard_error(area: float, positives: int, negatives: int) -> float:
    """Return the standard error of an area estimated from this many samples (Hanley and McNeil 1982)."""
    if not positives or not negatives:
        return math.nan
    both, one = area / (2 - area), 2 * area**2 / (1 + area)
    spread = (positives - 1) * (both - area**2) + (negatives - 1) * (one - area**2)
    return math.sqrt(max(0.0, area * (1 - area) + spread) / (positives * negatives))
