"""The order of the samples in an epoch, and the global batches of that order divided among ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


def permutation(length: int, seed: int, epoch: int) -> Indices:
    """Return the order of an epoch, shape (length,): the same with all versions of NumPy.

    Args:
        length: samples of the data set.
        seed: 0 to 2**32 - 1.
        epoch: the same.
    """
    order = np.random.RandomState([seed, epoch]).permutation(length)
    return order.astype(np.int64, copy=False)


def block(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return start and stop of a rank's block of ``count`` samples; sizes differ by at most one."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


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
