"""Batches of images of one orientation: each image once in an epoch, equally many batches on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdance.data.order import permutation

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """A rank's part of the images of a step.

    Attributes:
        numbers: of its images; of a rank that gets none, one of another rank's.
        weight: factor for its mean loss, so that the average over the ranks is the mean over the images of
            the step: images * ranks / count. 0 for a rank that gets none.
        position: images of the epoch that all ranks have used after this step.
        count: images of the step, of all ranks.
    """

    numbers: list[int]
    weight: float
    position: int
    count: int


class Plan:
    """The steps of an epoch that one rank takes part in.

    Images are shuffled, and batches are made of those with the same orientation, as they come: padded to the
    largest of them, they waste little. The last batch of each orientation may be short. Batches go to the
    ranks in turn, so that their sequence does not depend on the number of ranks: a training that resumes on
    another one uses no image twice.

    Args:
        ratios: width / height of each image.
        batch_size: images of a rank and step.
        seed, epoch: of the order.
        rank, size: of the job.
        done: images of this epoch that are used already: ``position`` of a step.

    Attributes:
        end: position after the last step.
    """

    def __init__(
        self, ratios: Array, batch_size: int, seed: int, epoch: int, rank: int, size: int, done: int = 0
    ) -> None:
        self.rank, self.size, self.end, self.done = rank, size, len(ratios), done
        waiting: dict[bool, list[int]] = {False: [], True: []}
        batches: list[list[int]] = []
        for number in permutation(len(ratios), seed, epoch).tolist():
            group = waiting[wide := bool(ratios[number] >= 1)]
            group.append(number)
            if len(group) == batch_size:
                batches.append(group)
                waiting[wide] = []
        batches += [group for group in waiting.values() if group]
        ends = np.cumsum([len(one) for one in batches])
        self.left = batches[int(np.searchsorted(ends, done, "right")) :]

    def __len__(self) -> int:
        """Return the number of steps that are left, the same on all ranks."""
        return -(-len(self.left) // self.size)

    def __iter__(self) -> Iterator[Part]:
        """Yield this rank's part of each step."""
        position = self.done
        for first in range(0, len(self.left), self.size):
            step = self.left[first : first + self.size]
            mine = step[self.rank] if self.rank < len(step) else []
            count = sum(map(len, step))
            position += count
            yield Part(mine or step[0][:1], len(mine) * self.size / count, position, count)
