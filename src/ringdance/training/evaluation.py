"""Count right answers over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdance.errors import ArgumentError
from ringdance.training.objects import allgather_json

__all__ = ["TopK"]


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
            labels: shape (n,), integers.
        """
        scores, labels = np.asarray(scores), np.asarray(labels)
        if scores.ndim != 2 or labels.shape != scores.shape[:1]:
            raise ArgumentError(
                f"TopK.add: scores of shape (n, classes) and labels of shape (n,) are needed, not "
                f"{scores.shape} and {labels.shape}."
            )
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
