"""Which samples of an epoch are whose, when the number of ranks may change within it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from ringdance.training import basics

__all__ = ["ElasticIndices"]


class ElasticIndices:
    """Deals the samples that are left of an epoch out to the ranks.

    The indices of the data set are shuffled by Python's random numbers, seeded with ``seed + epoch``, the
    first ``processed_num`` of them are done, and the rest, lengthened from its own start to a
    multiple of the ranks, is dealt out in turn. All ranks do the same: nothing is exchanged.

    Args:
        length: samples in the data set.
        shuffle: False keeps their order.
        seed: the same on all ranks.

    Attributes:
        epoch: as set by ``set_epoch``.
        processed_num: samples of this epoch that are done, on all ranks together.
        num_replicas, rank: as at the last ``reset``.
        remaining_indices: what was left of the epoch then.
        num_samples: how many of them each rank gets.
        total_size: all ranks together.
    """

    def __init__(self, length: int, shuffle: bool = True, seed: int = 0) -> None:
        self._length = length
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with nothing done. Call it when one is over: a restart goes on within an epoch."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has done a batch of this many samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the progress in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take over another's epoch and progress, and deal out anew."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is not done among the ranks that there are now."""
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        order = list(range(self._length))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # From its own start, several times over if fewer samples are left than there are ranks.
        lengthened = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return iter(list(lengthened)[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
