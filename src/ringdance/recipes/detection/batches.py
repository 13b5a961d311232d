"""Batches of images with one orientation: each image once per epoch, equally many batches on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdance.data.order import permutation

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """A rank's share of the images in a step.

    Attributes:
        numbers: Numbers of its images. For a rank that gets none, one of another rank's images.
        weight: Factor for its mean loss, images * ranks / count. With it, the average over ranks is the mean
            over the images in the step. 0 for a rank that gets none.
        position: Images of the epoch that all ranks have used after this step.
        count: Images in the step, over all ranks.
    """

    numbers: list[int]
    weight: float
    position: int
    count: int


class EpochSteps:
    """The steps of an epoch, from one rank's view.

    Images are shuffled. Batches take images of the same orientation in that order, so that padding them to
    the largest wastes little. The last batch of each orientation may be short. Batches go to the ranks in
    turn, so their sequence does not depend on the number of ranks: a training run that resumes with another
    number uses no image twice.

    Args:
        ratios: Width / height of each image.
        batch_size: Images per rank and step.
        seed: Seed of the order.
        epoch: Epoch of the order.
        rank: This process's rank.
        size: Number of ranks.
        done: Images of this epoch that are already used: the ``position`` after a step.

    Attributes:
        end: Position after the last step.
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
        ends = np.cumsum([len(batch) for batch in batches])
        self.left = batches[int(np.searchsorted(ends, done, "right")) :]

    def __len__(self) -> int:
        """Return the number of steps left. It is the same on all ranks."""
        return -(-len(self.left) // self.size)

    def __iter__(self) -> Iterator[Part]:
        """Yield this rank's share of each step."""
        position = self.done
        for first in range(0, len(self.left), self.size):
            step = self.left[first : first + self.size]
            own = step[self.rank] if self.rank < len(step) else []
            count = sum(map(len, step))
            position += count
            yield Part(own or step[0][:1], len(own) * self.size / count, position, count)
