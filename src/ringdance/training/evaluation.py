"""Evaluate predictions over all ranks: top-k accuracy, area under the ROC curve, and log-loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdance.core.request import Collective
from ringdance.data.tables.auc import counted, standard_error, won_twice
from ringdance.errors import ArgumentError
from ringdance.training import session
from ringdance.training.collectives import Array, Call
from ringdance.training.objects import allgather_json

__all__ = ["BinaryScores", "TopK"]

_SAMPLES = 256  # Number of scores that each rank samples, from which the ranks' score ranges are chosen.
_LEAST = 1e-15  # Minimum to which probabilities are clipped before the logarithm is taken.


class TopK:
    """Counts how often the correct class is among the top k. The result is exact.

    A class with the same score as the correct class is ranked above it. If the score of the correct class is
    NaN, all other classes are ranked above it.

    Args:
        ks: Values of k, such as (1, 5).

    Attributes:
        count: Number of samples added on this rank so far.
    """

    def __init__(self, ks: Sequence[int] = (1, 5)) -> None:
        if not ks or min(ks) < 1:
            raise ArgumentError(f"ks={ks!r} must be positive integers, such as (1, 5).")
        self.ks = tuple(ks)
        self.count = 0
        self._right = [0] * len(self.ks)

    def add(self, scores: Any, labels: Any) -> None:
        """Add samples on this rank.

        Args:
            scores: Array or tensor in host memory, of shape (n, classes).
            labels: Integers of shape (n,). Samples with a negative label are excluded from all counts.

        Raises:
            ArgumentError: The shapes do not match, or a label is not a valid class number.
        """
        scores, labels = np.asarray(scores), np.asarray(labels)
        if scores.ndim != 2 or labels.shape != scores.shape[:1] or labels.dtype.kind not in "iu":
            raise ArgumentError(
                f"TopK.add: scores must have shape (n, classes) and labels must be integers of shape (n,). "
                f"Received {scores.shape} and {labels.shape} ({labels.dtype})."
            )
        scores, labels = scores[labels >= 0], labels[labels >= 0]
        if labels.size and labels.max() >= scores.shape[1]:
            raise ArgumentError(
                f"TopK.add: label {labels.max()} is out of range for {scores.shape[1]} classes."
            )
        right = scores[np.arange(len(labels)), labels]
        better = np.count_nonzero(~(scores < right[:, None]), axis=1) - 1  # The correct class does not count.
        self.count += len(labels)
        for place, k in enumerate(self.ks):
            self._right[place] += int(np.count_nonzero(better < k))

    def result(self) -> dict[str, float]:
        """Return the "count" over all ranks, and "top1" etc. as fractions of it. A collective call."""
        everywhere = np.array(allgather_json([self.count, *self._right], "topk"), np.int64).sum(axis=0)
        count = int(everywhere[0])
        shares = {f"top{k}": int(n) / max(count, 1) for k, n in zip(self.ks, everywhere[1:], strict=True)}
        return {"count": count, **shares}


class BinaryScores:
    """Area under the ROC curve, log-loss and calibration of predicted probabilities, over all ranks.

    The area is exact. It is the fraction of pairs of a positive and a negative sample in which the positive
    sample has the higher score; equal scores count half (Mann and Whitney 1947). Scores are divided among
    the ranks by value, so no rank holds all scores.

    Attributes:
        count: Number of samples added on this rank so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._scores: list[Array] = []
        self._labels: list[Array] = []

    def add(self, probabilities: Any, labels: Any) -> None:
        """Add samples on this rank.

        Args:
            probabilities: Predicted probabilities of label 1: array or tensor in host memory, of shape (n,).
            labels: Labels, 0 or 1, of shape (n,).
        """
        scores, targets = np.array(probabilities, np.float64), np.asarray(labels)
        positive = targets > 0.5
        if scores.ndim != 1 or targets.shape != scores.shape or not (positive == targets).all():
            raise ArgumentError(
                f"BinaryScores.add: probabilities must have shape (n,), with n labels of 0 or 1. Received "
                f"{scores.shape} and {targets.shape} with labels such as {targets.reshape(-1)[:3].tolist()}."
            )
        self.count += len(scores)
        self._scores.append(scores)
        self._labels.append(positive)

    def result(self) -> dict[str, float]:
        """Return the metrics over all ranks. A collective call.

        Returns:
            "count", "positives", "auc", "auc_error" (the standard error of "auc"), "logloss" (natural
            logarithm, mean over the samples), and "calibration" (mean probability divided by mean label). A
            metric that is undefined for these samples is NaN.

        Raises:
            ArgumentError: A probability is not a number between 0 and 1. Raised on all ranks.
        """
        scores, positive = np.concatenate([np.zeros(0), *self._scores]), np.zeros(0, bool)
        positive = np.concatenate([positive, *self._labels])
        wrong = int(np.count_nonzero(~((scores >= 0) & (scores <= 1))))
        likely = np.clip(np.where(positive, scores, 1 - scores), _LEAST, 1)
        sums = [-float(np.log(likely).sum()), float(scores.sum())]
        own = [wrong, self.count, int(positive.sum()), *(sums if not wrong else [0.0, 0.0])]
        rows = allgather_json(own, "binary_scores")
        if bad := {rank: row[0] for rank, row in enumerate(rows) if row[0]}:
            where = ", ".join(f"{number} on rank {rank}" for rank, number in bad.items())
            raise ArgumentError(f"BinaryScores: some probabilities are not between 0 and 1 ({where}).")
        _, count, positives, loss, total = (sum(column) for column in zip(*rows, strict=True))
        nan = float("nan")
        pairs = positives * (count - positives)
        area = _pairs_won_twice(_divided(*counted(scores, positive))) / (2 * pairs) if pairs else nan
        return {
            "count": count, "positives": positives, "auc": area,
            "auc_error": standard_error(area, positives, count - positives),
            "logloss": loss / count if count else nan,
            "calibration": total / positives if positives else nan,
        }  # fmt: skip


def _divided(values: Array, counts: Array) -> Array:
    """Exchange scores and their counts so that each rank holds one range of scores. Ranges ascend by rank.

    Returns:
        The counts for this rank's range, of shape (n, 2), in the order of ascending scores.
    """
    engine = session.engine()
    if engine.size == 1:
        return counts
    chosen = values[np.linspace(0, len(values) - 1, min(_SAMPLES, len(values))).astype(int)]
    samples = np.sort(Call(Collective.ALLGATHER, "binary_scores.samples").submit(engine, (chosen,)).wait()[0])
    bounds = samples[[len(samples) * rank // engine.size for rank in range(1, engine.size)]]
    ends = np.concatenate([[0], np.searchsorted(values, bounds), [len(values)]])
    rows = np.column_stack([values, counts])  # Counts stay below 2**53, so float64 is exact.
    call = Call(Collective.ALLTOALL, "binary_scores.rows")
    received = call.submit(engine, (rows,), splits=[np.diff(ends)]).wait()[0]
    values, places = np.unique(received[:, 0], return_inverse=True)
    summed = np.zeros((len(values), 2), np.int64)
    np.add.at(summed, places, received[:, 1:].astype(np.int64))
    return summed


def _pairs_won_twice(counts: Array) -> int:
    """Return twice the number of pairs won by the positive sample, plus the ties. A collective call."""
    own = [won_twice(counts), *counts.sum(0).tolist()]
    won = lower = 0
    for pairs, positives, negatives in allgather_json(own, "binary_scores.pairs"):
        won += pairs + 2 * positives * lower
        lower += negatives
    return won
