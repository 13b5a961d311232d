"""Divide the samples of an epoch among the ranks, so that each sample is used once.

The samples are numbered 0 to ``length - 1``. With ``shuffle``, their order is drawn from ``seed`` and the
epoch, and is the same on all ranks. Each rank takes every ``size``-th sample in that order ("strided") or a
block ("contiguous"). If the samples cannot be divided evenly, ``ends`` determines what happens at the end:

- "pad": samples from the start of the order are repeated until all ranks have the same number. At most
  ``size - 1`` samples are seen twice (or more often, if there are fewer samples than ranks).
- "drop": the last ``length % size`` samples in the order are skipped. If ``shuffle`` is set, different
  samples are skipped in each epoch.
- "join": no sample is repeated or skipped. Some ranks have an extra sample, and the others call ``join()``.

There is no default, because the right choice depends on the purpose: training or evaluation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ringdance.data.order import SEEDS, Indices, block, permutation
from ringdance.errors import ArgumentError, MismatchError
from ringdance.training import session
from ringdance.training.objects import allgather_json
from ringdance.training.process_sets import ProcessSet, global_process_set, members_of, set_id

__all__ = ["Shard", "shard"]


class Shard:
    """This rank's samples in each epoch, as indices. Iterating yields the indices for ``epoch`` as integers.

    Unless ``rank`` and ``size`` are passed, this is a collective call: all ranks in the process set must make
    it, and their arguments are compared.

    Args:
        length: Number of samples in the dataset, the same on all ranks.
        ends: "pad", "drop" or "join": what to do if the samples cannot be divided evenly.
        shuffle: If True, each epoch has a different order.
        seed: Seed for shuffling, 0 to 2**32 - 1, the same on all ranks.
        layout: "strided" (rank r gets positions r, r + size, ... of the order) or "contiguous" (blocks).
        process_set: Ranks among which the samples are divided.
        rank, size: Override the rank in the set, and the set size. If passed, arguments are not compared.

    Attributes:
        epoch: Epoch set by ``set_epoch``, initially 0.

    Raises:
        ArgumentError: An argument is wrong, or "drop" would leave no samples.
        MismatchError: The ranks passed different arguments. Raised on all ranks.
    """

    def __init__(
        self, length: int, *, ends: str, shuffle: bool = False, seed: int = 0, layout: str = "strided",
        process_set: ProcessSet = global_process_set, rank: int | None = None, size: int | None = None,
    ) -> None:
        self.length = _whole("length", length)
        self.shuffle = bool(shuffle)
        self.seed = _whole("seed", seed, SEEDS)
        if layout not in ("strided", "contiguous"):
            raise ArgumentError(f"layout={layout!r} is invalid. Use 'strided' or 'contiguous'.")
        self.ends = ends
        self.layout = layout
        self.epoch = 0
        same = {
            "length": self.length, "ends": ends, "shuffle": self.shuffle, "seed": self.seed, "layout": layout
        }  # fmt: skip
        self.rank, self.size = check_plan(ends, same, process_set, rank, size)
        if ends == "drop" and 0 < self.length < self.size:
            raise ArgumentError(
                f"ends='drop' would skip all samples: there are {self.length} for {self.size} ranks. Use "
                "'pad' or 'join', or start fewer ranks."
            )

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, which determines the order. Call this before each epoch, on all ranks."""
        self.epoch = _whole("epoch", epoch, SEEDS)

    def indices(self, epoch: int | None = None) -> Indices:
        """Return the indices of this rank's samples, in order. ``None`` means the current epoch."""
        positions = self.positions()
        if self.length:
            positions %= self.length  # Positions after the end wrap around to the start.
        if not self.shuffle:
            return positions
        number = self.epoch if epoch is None else _whole("epoch", epoch, SEEDS)
        return permutation(self.length, self.seed, number)[positions]

    def positions(self) -> Indices:
        """Return this rank's positions in the order of an epoch. Positions from ``length`` up are padding."""
        start, stop, step = self.span()
        return np.arange(start, stop, step, dtype=np.int64)

    def span(self) -> tuple[int, int, int]:
        """Return this rank's positions as a range: start, stop and step."""
        total = total_of(self.length, self.size, self.ends)
        if self.layout == "strided":
            return self.rank, total, self.size
        start, stop = block(total, self.rank, self.size)
        return start, stop, 1

    def batches(self, batch_size: int) -> Iterator[Indices]:
        """Yield ``indices()`` in batches of ``batch_size``. The last batch may be shorter."""
        if _whole("batch_size", batch_size) < 1:
            raise ArgumentError("batch_size must be at least 1.")
        indices = self.indices()
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]

    def take(self, *arrays: Any) -> Any:
        """Return this rank's rows of an array that has ``length`` rows. For several arrays, return a tuple.

        Raises:
            ArgumentError: An array has a different number of rows.
        """
        for array in arrays:
            if len(array) != self.length:
                raise ArgumentError(f"take(): an array has {len(array)} rows instead of {self.length}.")
        indices = self.indices()
        rows = tuple([array[indices] for array in arrays])
        return rows[0] if len(rows) == 1 else rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return len(range(*self.span()))


def shard(
    data: Any, *, ends: str, shuffle: bool = False, seed: int = 0, layout: str = "strided",
    process_set: ProcessSet = global_process_set,
) -> Shard:
    """Return this rank's share of a dataset, as indices. See ``Shard``.

    The result is a PyTorch sampler: ``DataLoader(data, batch_size=32, sampler=hvd.shard(data, ends="pad"))``.

    Args:
        data: Number of samples, or an indexable object such as an array, a list or a PyTorch dataset.
        ends: "pad", "drop" or "join".
        shuffle: If True, each epoch has a different order.
        seed: Seed for shuffling.
        layout: "strided" or "contiguous".
        process_set: Ranks among which the samples are divided.

    Raises:
        ArgumentError: ``data`` is not indexable, or another argument is wrong.
    """
    if not isinstance(data, int | np.integer):
        numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not numbered or isinstance(data, str | bytes | tuple | Mapping):
            kinds = "a dataset, a single array (for a tuple or dict of arrays), or the number of samples"
            raise ArgumentError(f"shard(): a {type(data).__name__} has no numbered samples. Pass {kinds}.")
        data = len(data)
    return Shard(data, ends=ends, shuffle=shuffle, seed=seed, layout=layout, process_set=process_set)


def total_of(length: int, size: int, ends: str) -> int:
    """Return the total number of positions on all ranks."""
    if ends == "join" or not length:
        return length
    return length // size * size if ends == "drop" else -(-length // size) * size


def check_plan(
    ends: str, same: dict[str, Any], process_set: ProcessSet = global_process_set,
    rank: int | None = None, size: int | None = None,
) -> tuple[int, int]:
    """Compare the arguments of all ranks, and return the rank and size with which to divide the data.

    Args:
        ends: "pad", "drop" or "join".
        same: Names and values of arguments that must match on all ranks. Not compared if ``rank`` is passed.
        process_set: Ranks among which the data are divided.
        rank: Overrides this process's rank in the process set.
        size: Overrides the size of the process set.

    Raises:
        ArgumentError: ``ends`` is unknown, "join" is used with a process set, or rank or size is invalid.
        MismatchError: Arguments differ. Raised on all ranks.
    """
    if ends not in ("pad", "drop", "join"):
        raise ArgumentError(
            f"ends={ends!r} is invalid. Choose what happens if the samples cannot be divided evenly: 'pad' "
            "(some are repeated), 'drop' (some are skipped) or 'join' (some ranks have one more, and the "
            "others call join())."
        )
    if ends == "join" and process_set is not global_process_set:
        raise ArgumentError(
            "ends='join' cannot be used in a process set, as join() involves all ranks. Use 'pad' or 'drop'."
        )
    if (rank is None) != (size is None):
        raise ArgumentError("Pass both rank and size, or neither.")
    if rank is not None and size is not None:
        size = _whole("size", size)
        if not 0 <= _whole("rank", rank) < size:
            raise ArgumentError(f"rank={rank} is out of range for {size} ranks. Use 0 to {size - 1}.")
        return rank, size
    engine = session.engine()
    members = members_of(engine, set_id(process_set))
    _compare(same, process_set, members)
    return members.index(engine.rank), len(members)


def _compare(same: dict[str, Any], process_set: ProcessSet, members: tuple[int, ...]) -> None:
    """Raise MismatchError if the ranks passed different arguments, which would make their shares wrong."""
    if len(members) == 1:
        return
    by_rank = allgather_json(same, "shard", process_set)
    for name in same:
        values = [arguments.get(name) for arguments in by_rank]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"rank {rank}: {value!r}" for rank, value in zip(members, values, strict=True))
            raise MismatchError(
                f"shard(): {name} differs between the ranks ({shown}). Samples would be skipped or "
                "used twice. Pass the same value on all ranks."
            )


def _whole(name: str, value: Any, end: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, (bool, np.bool_)) or number < 0 or (end is not None and number >= end):
        limit = "" if end is None else f" and below {end}"
        raise ArgumentError(f"{name}={value!r} must be a non-negative integer{limit}.")
    return number
