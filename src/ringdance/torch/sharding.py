"""This rank's share of a data set for a DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ringdance.errors import ArgumentError
from ringdance.training import sharding
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import Shard


class ShardedStream(IterableDataset[Any]):
    """This rank's items of an ``IterableDataset``, in a loader with workers shared out between these.

    Each rank, and each worker, reads the whole stream, which must be the same everywhere.
    """

    def __init__(self, dataset: IterableDataset[Any], ends: str, rank: int, size: int) -> None:
        self.dataset = dataset
        self.ends, self.rank, self.size = ends, rank, size

    def __iter__(self) -> Iterator[Any]:
        mine = sharding.stream_share(self.dataset, ends=self.ends, rank=self.rank, size=self.size)
        worker = get_worker_info()
        return mine if worker is None else itertools.islice(mine, worker.id, None, worker.num_workers)

    def __len__(self) -> int:
        length: int = len(self.dataset)  # type: ignore[arg-type]  # TypeError where it has none, as it should
        return len(Shard(length, ends=self.ends, rank=self.rank, size=self.size))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the stream, if it has ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def shard(
    dataset: Any, *, ends: str, shuffle: bool = False, seed: int = 0, layout: str = "strided",
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this rank's share of a data set.

    A data set with a length gives a sampler, an ``IterableDataset`` another one::

        loader = DataLoader(data, batch_size=32, sampler=hvd.shard(data, ends="pad", shuffle=True))
        loader = DataLoader(hvd.shard(stream, ends="drop"), batch_size=32)

    Args:
        dataset: what the loader reads; or the number of samples.
        ends: "pad", "drop" or "join": what happens if the ranks cannot have equally many samples.
        shuffle: in another order each epoch: call the sampler's ``set_epoch(epoch)`` before each.
        seed: of the order, equal on all ranks.
        layout: "strided" or "contiguous".
        process_set: the ranks among which samples are divided; all of them make this call.

    Returns:
        A ``Shard`` or a ``ShardedStream``.

    Raises:
        ArgumentError: an argument is wrong; for a stream also ``shuffle`` and "contiguous".
        MismatchError: the ranks gave different arguments; raised on all.
    """
    if not isinstance(dataset, IterableDataset):
        return sharding.shard(
            dataset, ends=ends, shuffle=shuffle, seed=seed, layout=layout, process_set=process_set
        )
    if shuffle or layout != "strided":
        raise ArgumentError(
            f"shard() of a stream with shuffle={shuffle}, layout={layout!r}: a stream is divided in "
            "its order, strided. Shuffle in the stream itself, in the same way on all ranks, or give a data "
            "set that has a length."
        )
    rank, size = sharding.check_plan(ends, {"ends": ends}, process_set)
    return ShardedStream(dataset, ends, rank, size)
