"""The order of the samples in an epoch, and the global batches of that order divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringdance.errors import ArgumentError

Indices = np.ndarray[Any, np.dtype[np.int64]]
SEEDS = 1 << 32  # of NumPy's frozen generator: its numbers are the same in all versions


def permutation(length: int, seed: int, epoch: int) -> Indices:
    """Return the order of an epoch, shape (length,): the same with all versions of NumPy.

    Args:
        length: samples of the data set.
        seed: 0 to 2**32 - 1.
        epoch: the same.
    """
    order = np.random.RandomState([seed, epoch]).permutation(length)
    return order.astype(np.int64, copy=False)


# Note [Order by pieces]
# Samples that follow one another in a file are a piece, which is read at once. The pieces are shuffled and
# dealt out to lanes. In a lane samples are mixed with those of the next pieces: each has a random place
# within _MIXED pieces. The order of the epoch takes one sample of each lane in turn. So a global batch has
# samples of all lanes, hence of 64 * 4 pieces; it is sorted by lane before it is divided among the ranks, so
# that the ranks of a host read few pieces of others. Neither depends on the number of ranks: an epoch goes on
# with any. With more hosts than lanes, several read the same piece. What is read stays in the page cache
# until all its samples are used: 64 * 4 pieces over all hosts, 0.5 GB of 2 MiB each; a piece that memory
# cannot hold so long is read again, sample by sample.
_LANES, _MIXED = 64, 4


def by_pieces(length: int, piece: int, seed: int, epoch: int) -> tuple[Indices, Any]:
    """Return the order of an epoch, shape (length,), and the lane of each piece: see Note [Order by pieces].

    Args:
        length: samples of the data set.
        piece: of each piece.
        seed: 0 to 2**32 - 1.
        epoch: the same.
    """
    random = np.random.RandomState([seed, epoch])
    pieces = random.permutation(-(-length // piece))
    lanes = np.empty(len(pieces), np.uint8)
    lanes[pieces] = np.arange(len(pieces)) % _LANES
    within, order = np.full(len(pieces) * piece, np.inf), np.empty(length, np.int64)
    within[:length] = random.random_sample(length)
    counts = np.bincount(lanes, minlength=_LANES) * piece
    counts[lanes[-1]] -= len(pieces) * piece - length  # the last piece is short
    begin = np.minimum(np.arange(counts.max() + 1)[:, None], counts).sum(1)  # of each turn
    for lane, count in enumerate(counts):
        samples = (pieces[lane::_LANES, None] * piece + np.arange(piece)).ravel()
        keys = np.arange(len(samples)) // piece + _MIXED * within[samples]
        order[begin[:count]] = samples[np.argsort(keys, kind="stable")[:count]]
        begin[:count] += 1  # the next lane's place in each turn
    return order, lanes


def block(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return start and stop of a rank's block of ``count`` samples; sizes differ by at most one."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


class Plan:
    """Which samples a rank has in each batch of an epoch; what loaders of all kinds share.

    Args:
        length: samples of the data set.
        batch_size: of each rank.
        shuffle: another order in each epoch.
        seed: of the order.
        rank, size: of the job.
        block: samples that stay together, in their order, where they are shuffled.
        drop_last: leave out the last global batch of an epoch where it is short.
        piece: samples that are read at once, but mixed with others; 0: each by itself.
    """

    def __init__(
        self, length: int, batch_size: int, shuffle: bool, seed: int, rank: int, size: int, block: int = 1,
        drop_last: bool = False, piece: int = 0,
    ) -> None:
        check_positive(length=length, batch_size=batch_size, size=size)
        if not 0 <= rank < size:
            raise ArgumentError(f"rank={rank} is not one of {size} ranks: give 0 to {size - 1}.")
        if not 0 <= seed < SEEDS:
            raise ArgumentError(f"seed={seed}: give an integer from 0 to 2**32 - 1.")
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        if drop_last and length < batch_size * size:
            raise ArgumentError(
                f"batch_size={batch_size}: a global batch of {size} ranks is {batch_size * size} samples, "
                f"the data set has {length}, and drop_last leaves out short batches: "
                + (f"give batch_size={length // size} or less." if length >= size else "use fewer ranks.")
            )
        self.rank, self.size, self.block, self.drop_last = rank, size, block, drop_last
        self.piece = piece if shuffle else 0
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose the epoch, and after how many samples of its order to begin.

        Args:
            epoch: its number, from 0; another order for each.
            position: the ``position`` of the last batch that was consumed, with any number of ranks.

        Raises:
            ArgumentError: the epoch has fewer samples.
        """
        if not 0 <= epoch < SEEDS:
            raise ArgumentError(f"epoch={epoch}: give an integer from 0 to 2**32 - 1.")
        if not 0 <= position <= self.length:
            raise ArgumentError(
                f"position={position}: an epoch has {self.length} samples. Is it the data set that the "
                "checkpoint was made with?"
            )
        self.epoch, self.position = int(epoch), int(position)

    @property
    def whole(self) -> int:
        """Samples of a global batch that is not short."""
        return self.batch_size * self.size

    @property
    def where(self) -> str:
        """The beginning of an error's text: the rank, if there are others."""
        return f"rank {self.rank}: " if self.size > 1 else ""

    @property
    def end(self) -> int:
        """The position at which the epoch is over: the number of samples, without those left out."""
        left = (self.length - self.position) % self.whole if self.drop_last else 0
        return self.length - left

    def position_after(self, batches: int) -> int:
        """Return the position in the epoch after so many batches from the one that is set."""
        return min(self.position + batches * self.whole, self.end)

    def __len__(self) -> int:
        """Return the number of batches left in the epoch, equal on all ranks."""
        return -(-(self.end - self.position) // self.whole)

    def batches(self) -> Iterator[tuple[Indices, float, int, int]]:
        """Yield the samples of this rank, weight, position and count of the batches that are left.

        A rank that would get none gets the first sample of the global batch, with weight 0.
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
                mine = rows[begin + start : begin + stop]
            else:
                together = rows[begin : begin + count]
                mine = together[np.argsort(lanes[together // self.piece], kind="stable")[start:stop]]
            yield mine, weight, begin + count, count


class _Blocks:
    """The order of samples by the order of their blocks, which takes memory for the blocks only."""

    def __init__(self, order: Indices, block: int, length: int) -> None:
        sizes = np.minimum(block, length - order * block)
        self._ends = np.cumsum(sizes)  # in the order
        self._shift = order * block - (self._ends - sizes)

    def __getitem__(self, part: slice) -> Indices:
        at = np.arange(part.start, part.stop)
        return self._shift[np.searchsorted(self._ends, at, "right")] + at


def check_positive(**counts: int) -> None:
    """Raise ArgumentError for a count below 1; a length may be 0."""
    for name, value in counts.items():
        if value < (0 if name == "length" else 1):
            raise ArgumentError(f"{name}={value!r}: give a positive integer.")


class Draws:
    """Random numbers in [0, 1) of one sample, the same whatever the rank, the thread or the batch.

    Counted by a hash (SplitMix64) of seed, epoch and sample: seeding a generator of NumPy takes as long as
    resizing a small image.
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
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
