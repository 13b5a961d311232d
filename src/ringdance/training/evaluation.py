"""Count right answers, and rank scores, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdance.core.request import Collective
from ringdance.data.tables.auc import counted, standard_error, won_twice
from ringdance.errors import ArgumentError
from ringdance.training import session
from ringdance.training.collectives import Call
from ringdance.training.objects import allgather_json

__all__ = ["BinaryScores", "TopK"]

Array = np.ndarray[Any, Any]

_SAMPLES = 256  # of each rank's scores, to divide all scores among the ranks
_LEAST = 1e-15  # as of a probability's logarithm


class TopK:
    """Count how often the right class is among the k best, exactly: as integers, summed over the ranks.

    A class with an equal score counts as better than the right one, and so does every class if the score of
    the right one is no number.

    Args:
        ks: such as (1, 5).

    Attributes:
        count: samples of this rank so far.
    """

    def __init__(self, ks: Sequence[int] = (1, 5)) -> None:
        if not ks or min(ks) < 1:
            raise ArgumentError(f"ks={ks!r}: give positive integers, such as (1, 5).")
        self.ks = tuple(ks)
        self.count = 0
        self._right = [0] * len(self.ks)

    def add(self, scores: Any, labels: Any) -> None:
        """Count samples of this rank.

        Args:
            scores: shape (n, classes): an array, or a tensor in the host's memory.
            labels: shape (n,), integers; samples with a negative one are left out of all counts.

        Raises:
            ArgumentError: shapes do not fit, or a label is no integer or not that of a class.
        """
        scores, labels = np.asarray(scores), np.asarray(labels)
        if scores.ndim != 2 or labels.shape != scores.shape[:1] or labels.dtype.kind not in "iu":
            raise ArgumentError(
                f"TopK.add: scores of shape (n, classes) and integer labels of shape (n,) are needed, not "
                f"{scores.shape} and {labels.shape} ({labels.dtype})."
            )
        scores, labels = scores[labels >= 0], labels[labels >= 0]
        if labels.size and labels.max() >= scores.shape[1]:
            raise ArgumentError(f"TopK.add: label {labels.max()} with scores of {scores.shape[1]} classes.")
        right = scores[np.arange(len(labels)), labels]
        better = np.count_nonzero(~(scores < right[:, None]), axis=1) - 1  # itself is not less
        self.count += len(labels)
        for place, k in enumerate(self.ks):
            self._right[place] += int(np.count_nonzero(better < k))

    def result(self) -> dict[str, float]:
        """Return "count" of all ranks, and "top1" etc. as shares of it; a collective call."""
        everywhere = np.array(allgather_json([self.count, *self._right], "topk"), np.int64).sum(axis=0)
        count = int(everywhere[0])
        shares = {f"top{k}": int(n) / max(count, 1) for k, n in zip(self.ks, everywhere[1:], strict=True)}
        return {"count": count, **shares}


class BinaryScores:
    """Area under the ROC curve, log-loss and calibration of predicted probabilities, over all ranks.

    The area is exact: the share of pairs of a positive and a negative sample in which the positive one has
    the higher score; equal scores count half (Mann and Whitney 1947). Scores are divided among the ranks by
    value, so no rank holds those of all.

    Attributes:
        count: samples of this rank so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._scores: list[Array] = []
        self._labels: list[Array] = []

    def add(self, probabilities: Any, labels: Any) -> None:
        """Count samples of this rank.

        Args:
            probabilities: of label 1, shape (n,): an array, or a tensor in the host's memory.
            labels: 0 or 1, shape (n,).
        """
        scores, targets = np.array(probabilities, np.float64), np.asarray(labels)
        positive = targets > 0.5
        if scores.ndim != 1 or targets.shape != scores.shape or not (positive == targets).all():
            raise ArgumentError(
                f"BinaryScores.add: probabilities of shape (n,) and as many labels of 0 or 1 are needed, not "
                f"{scores.shape} and {targets.shape} with labels such as {targets.reshape(-1)[:3].tolist()}."
            )
        self.count += len(scores)
        self._scores.append(scores)
        self._labels.append(positive)

    def result(self) -> dict[str, float]:
        """Return the figures of all ranks; a collective call.

        Returns:
            "count", "positives", "auc", "auc_error" (its standard error), "logloss" (natural logarithm, mean
            over the samples), and "calibration": mean probability by mean label. NaN where there are no
            samples to tell it.

        Raises:
            ArgumentError: a probability is no number between 0 and 1; on all ranks.
        """
        scores, positive = np.concatenate([np.zeros(0), *self._scores]), np.zeros(0, bool)
        positive = np.concatenate([positive, *self._labels])
        wrong = int(np.count_nonzero(~((scores >= 0) & (scores <= 1))))
        likely = np.clip(np.where(positive, scores, 1 - scores), _LEAST, 1)
        sums = [-float(np.log(likely).sum()), float(scores.sum())]
        mine = [wrong, self.count, int(positive.sum()), *(sums if not wrong else [0.0, 0.0])]
        rows = allgather_json(mine, "binary_scores")
        if bad := {rank: row[0] for rank, row in enumerate(rows) if row[0]}:
            where = ", ".join(f"{number} of rank {rank}" for rank, number in bad.items())
            raise ArgumentError(f"BinaryScores: probabilities that are not between 0 and 1: {where}.")
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
    """Exchange counted scores so that each rank has those of a range, in the order of the ranks.

    Returns:
        The counts by ascending scores, shape (n, 2).
    """
    engine = session.engine()
    if engine.size == 1:
        return counts
    chosen = values[np.linspace(0, len(values) - 1, min(_SAMPLES, len(values))).astype(int)]
    samples = np.sort(Call(Collective.ALLGATHER, "binary_scores.samples").submit(engine, (chosen,)).wait()[0])
    bounds = samples[[len(samples) * rank // engine.size for rank in range(1, engine.size)]]
    ends = np.concatenate([[0], np.searchsorted(values, bounds), [len(values)]])
    rows = np.column_stack([values, counts])  # counts are integers below 2**53
    call = Call(Collective.ALLTOALL, "binary_scores.rows")
    received = call.submit(engine, (rows,), splits=[np.diff(ends)]).wait()[0]
    values, places = np.unique(received[:, 0], return_inverse=True)
    summed = np.zeros((len(values), 2), np.int64)
    np.add.at(summed, places, received[:, 1:].astype(np.int64))
    return summed


def _pairs_won_twice(counts: Array) -> int:
    """Return twice the number of pairs in which the positive sample is higher, ties as half; collective."""
    own = [won_twice(counts), *counts.sum(0).tolist()]
    won = lower = 0
    for pairs, more, less in allgather_json(own, "binary_scores.pairs"):
        won += pairs + 2 * more * lower
        lower += less
    return won
