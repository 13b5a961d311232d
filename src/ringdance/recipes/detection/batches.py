"""Group images into batches by orientation.

Each image is used once per epoch, and all ranks have the same number of batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """One rank's share of the images in a step.

    Attributes:
        numbers: Numbers of this rank's images or, if it has none, of another rank's image with weight 0.
        weight: Factor for this rank's mean loss: ``images * ranks / count``. With it, the average of the
            losses over all ranks is the mean over all images in the step. It is 0 for a rank without images.
        position: Number of the epoch's images that all ranks together have used after this step.
        count: Total number of images in the step on all ranks.
    """

    numbers: list[int]
    weight: float
    position: int
    count: int


class EpochSteps:
    """Yields one rank's share of each step in an epoch.

    Images are shuffled, and then grouped into batches of the same orientation, so that padding them to a
    common size wastes little memory. The last batch of each orientation may be short. Batches are assigned to
    ranks round-robin, so their sequence does not depend on the number of ranks. A training run that resumes
    with a different number of ranks therefore does not use any image twice.

    Args:
        ratios: Aspect ratio (width / height) of each image.
        batch_size: Number of images per rank and step.
        seed: Random seed for shuffling.
        epoch: Epoch number. Each epoch has a different order.
        rank: This process's rank.
        size: Number of ranks.
        done: Number of images of this epoch that have already been used, such as a part's ``position``.

    Attributes:
        end: ``position`` after the last step.
    """

    def __init__(
        self, ratios: Array, batch_size: int, seed: int, epoch: int, rank: int, size: int, done: int = 0
    ) -> None:
        self.rank, self.size, self.end, self.done = rank, size, len(ratios), done
        waiting: dict[bool, list[int]] = {False: [], True: []}
        batches: list[list[int]] = []
        # The results of RandomState are the same in all versions of NumPy.
        for number in np.random.RandomState([seed, epoch]).permutation(len(ratios)).tolist():
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
