"""Choose the order of samples in an epoch, and divide global batches among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringdance.errors import ArgumentError

Indices = np.ndarray[Any, np.dtype[np.int64]]
SEEDS = 1 << 32  # number of valid seeds for RandomState, whose results do not depend on NumPy's version


def permutation(length: int, seed: int, epoch: int) -> Indices:
    """Return an epoch's order of samples, shape (length,). It is the same in all versions of NumPy.

    Args:
        length: Number of samples in the data set.
        seed: Seed, from 0 to 2**32 - 1.
        epoch: Epoch number, from 0 to 2**32 - 1.
    """
    order = np.random.RandomState([seed, epoch]).permutation(length)
    return order.astype(np.int64, copy=False)


# Note [Order by pieces]
# A piece is a run of consecutive samples that are read together. The pieces are shuffled and dealt out to
# lanes. Within a lane, each sample gets a random place within _MIXED pieces, so the samples of neighboring
# pieces mix. The order of the epoch takes one sample from each lane in turn. A global batch therefore has
# samples from all lanes, hence from 64 * 4 pieces. It is sorted by lane before it is divided among the ranks,
# so that few pieces are read by more than one host. The order and the lanes do not depend on the number of
# ranks, so an epoch can resume with a different number. If there are more hosts than lanes, several hosts
# read the same piece. A piece stays in the page cache until all its samples have been used, so all hosts
# together cache 64 * 4 pieces, or 0.5 GB at 2 MiB each. If memory cannot hold a piece that long, it is read
# again, sample by sample.
_LANES, _MIXED = 64, 4


def by_pieces(length: int, piece: int, seed: int, epoch: int) -> tuple[Indices, Any]:
    """Return an epoch's order of samples, and the lane of each piece. See Note [Order by pieces].

    Args:
        length: Number of samples in the data set.
        piece: Samples per piece.
        seed: Seed, from 0 to 2**32 - 1.
        epoch: Epoch number, from 0 to 2**32 - 1.
    """
    random = np.random.RandomState([seed, epoch])
    pieces = random.permutation(-(-length // piece))
    lanes = np.empty(len(pieces), np.uint8)
    lanes[pieces] = np.arange(len(pieces)) % _LANES
    within, order = np.full(len(pieces) * piece, np.inf), np.empty(length, np.int64)
    within[:length] = random.random_sample(length)
    counts = np.bincount(lanes, minlength=_LANES) * piece
    counts[lanes[-1]] -= len(pieces) * piece - length  # the last piece is short
    begin = np.minimum(np.arange(counts.max() + 1)[:, None], counts).sum(1)  # start of each round of lanes
    for lane, count in enumerate(counts):
        samples = (pieces[lane::_LANES, None] * piece + np.arange(piece)).ravel()
        keys = np.arange(len(samples)) // piece + _MIXED * within[samples]
        order[begin[:count]] = samples[np.argsort(keys, kind="stable")[:count]]
        begin[:count] += 1  # position of the next lane's sample in each round
    return order, lanes


def block(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return the start and stop of a rank's block when ``count`` samples are divided among the ranks."""
    each, remainder = divmod(count, size)
    start = rank * each + min(rank, remainder)
    return start, start + each + (rank < remainder)


class BatchPlan:
    """Decides which samples a rank gets in each batch of an epoch. Used for images and tables.

    Args:
        length: Number of samples in the data set.
        batch_size: Samples per batch on each rank.
        shuffle: If True, use a different order in each epoch.
        seed: Seed of the order, from 0 to 2**32 - 1.
        rank: This process's rank.
        size: Number of ranks.
        block: Number of consecutive samples that shuffling keeps together and in order.
        drop_last: If True, skip an epoch's last global batch if it is short.
        piece: Number of consecutive samples that are read together but mixed with others in the order. If 0,
            each sample is read separately.
    """

    def __init__(
        self, length: int, batch_size: int, shuffle: bool, seed: int, rank: int, size: int, block: int = 1,
        drop_last: bool = False, piece: int = 0,
    ) -> None:
        check_positive(length=length, batch_size=batch_size, size=size)
        if not 0 <= rank < size:
            raise ArgumentError(f"rank={rank} is out of range for {size} ranks. Use 0 to {size - 1}.")
        if not 0 <= seed < SEEDS:
            raise ArgumentError(f"seed={seed} is out of range. Use an integer from 0 to 2**32 - 1.")
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        if drop_last and length < batch_size * size:
            raise ArgumentError(
                f"batch_size={batch_size}: a global batch of {size} ranks has {batch_size * size} samples, "
                f"but the data set has {length}, and drop_last skips short batches. "
                + (f"Use batch_size={length // size} or less." if length >= size else "Use fewer ranks.")
            )
        self.rank, self.size, self.block, self.drop_last = rank, size, block, drop_last
        self.piece = piece if shuffle else 0
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Set the epoch, and the position in its order at which to start.

        Args:
            epoch: Number of the epoch, from 0. Each has a different order.
            position: The ``position`` of the last batch consumed, on any number of ranks.

        Raises:
            ArgumentError: The epoch has fewer than ``position`` samples, or its number is out of range.
        """
        if not 0 <= epoch < SEEDS:
            raise ArgumentError(f"epoch={epoch} is out of range. Use an integer from 0 to 2**32 - 1.")
        if not 0 <= position <= self.length:
            raise ArgumentError(
                f"position={position} is out of range for a data set of {self.length} samples. If it is from "
                "a checkpoint, use the same data set as when the checkpoint was written."
            )
        self.epoch, self.position = int(epoch), int(position)

    @property
    def whole(self) -> int:
        """Number of samples in a full global batch."""
        return self.batch_size * self.size

    @property
    def where(self) -> str:
        """Prefix for error messages: the rank, if there are several ranks."""
        return f"rank {self.rank}: " if self.size > 1 else ""

    @property
    def end(self) -> int:
        """The position at which the epoch ends: the number of samples, excluding those that are skipped."""
        left = (self.length - self.position) % self.whole if self.drop_last else 0
        return self.length - left

    def position_after(self, batches: int) -> int:
        """Return the position in the epoch after ``batches`` more batches."""
        return min(self.position + batches * self.whole, self.end)

    def __len__(self) -> int:
        """Return the number of batches left in the epoch. It is the same on all ranks."""
        return -(-(self.end - self.position) // self.whole)

    def batches(self) -> Iterator[tuple[Indices, float, int, int]]:
        """Yield this rank's sample numbers, weight, position and count for each remaining batch.

        A rank for which no samples are left gets the first sample of the global batch, with weight 0.
        """
        rows: Any
        lanes = None
        if self.piece:
            rows, lanes = by_pieces(self.length, self.piece, self.seed, self.epoch)
        else:
            blocks = -(-self.length // self.block)
            order = permutation(blocks, self.seed, self.epoch) if self.shuffle else np.arange(blocks)
            rows = order if self.block == 1 else _Blocks(order, self.block, self.length)
        for begin in range(self.position, self.end, self.whole):
            count = min(self.whole, self.length - begin)
            start, stop = block(count, self.rank, self.size)
            weight = (stop - start) * self.size / count
            start, stop = (start, stop) if stop > start else (0, 1)
            if lanes is None:
                samples = rows[begin + start : begin + stop]
            else:
                together = rows[begin : begin + count]
                samples = together[np.argsort(lanes[together // self.piece], kind="stable")[start:stop]]
            yield samples, weight, begin + count, count


class _Blocks:
    """Sample numbers in shuffled order, computed on demand from the order of the blocks to save memory."""

    def __init__(self, order: Indices, block: int, length: int) -> None:
        sizes = np.minimum(block, length - order * block)
        self._ends = np.cumsum(sizes)  # end position of each block in the shuffled order
        self._shift = order * block - (self._ends - sizes)

    def __getitem__(self, part: slice) -> Indices:
        places = np.arange(part.start, part.stop)
        return self._shift[np.searchsorted(self._ends, places, "right")] + places


def check_positive(**counts: int) -> None:
    """Raise ArgumentError if a count is less than 1. A count named ``length`` may be 0."""
    for name, value in counts.items():
        if value < (0 if name == "length" else 1):
            raise ArgumentError(f"{name}={value!r} is not valid. Use a positive integer.")


class Draws:
    """Generates random numbers for one sample that do not depend on the rank, the thread or the batch.

    The numbers come from a hash (SplitMix64) of the seed, the epoch and the sample, because seeding a NumPy
    generator takes as long as resizing a small image.
    """

    def __init__(self, seed: int, epoch: int, sample: int) -> None:
        self._state = _mixed(_mixed(_mixed(seed) ^ epoch) ^ sample)

    def __call__(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return the next number, in [low, high)."""
        self._state = (self._state + _STEP) & _MASK
        return low + (high - low) * (_mixed(self._state) >> 11) / (1 << 53)


_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _mixed(value: int) -> int:
    """Apply SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
