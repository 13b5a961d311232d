"""Batches of a table in the order of an epoch, read ahead by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ringdance.data.batches import Batches, Epoch, Wait
from ringdance.data.order import Indices, Plan, check_positive
from ringdance.data.tables.rows import BLOCK, Array
from ringdance.data.tables.table import Table
from ringdance.errors import ArgumentError

_READ = 4096  # rows that are read at once, in whole batches: parsing few takes as long as parsing hundreds

Part = tuple[Indices, float, int, int]


@dataclass
class TableBatch:
    """One rank's part of a global batch.

    Attributes:
        labels: shape (n,), float32.
        ids: shape (n, fields), int64: rows of the table of embeddings.
        values: shape (n, fields), float32: their factors.
        weight: factor for this rank's mean loss, so that the average over ranks is the mean over the rows of
            the global batch: ``n * size / count``. 0 for a rank that got none: it has one row of padding.
        position: rows of the epoch that all ranks have consumed after this batch.
        count: rows of the global batch.
    """

    labels: Any
    ids: Any
    values: Any
    weight: float
    position: int
    count: int

    def converted(self, make: Callable[[Array], Any]) -> TableBatch:
        """Return the same with what `make` makes of labels, ids and values."""
        return replace(self, labels=make(self.labels), ids=make(self.ids), values=make(self.values))


class TableLoader(Batches):
    """Batches of a table, the rest of an epoch at each iteration.

    An epoch takes blocks of 256 rows in an order drawn from ``seed`` and the epoch, the same for any format
    and any number of ranks; each rank reads only its own part.

    Args:
        table: what is read.
        batch_size: rows for this rank in each batch.
        shuffle: another order of the blocks in each epoch; otherwise that of the files.
        seed: of the order.
        rank, size: of the job; every rank gets its part of each global batch.
        threads: that read and parse.
        prefetch: batches that are prepared ahead, at least.
        drop_last: leave out the last global batch of an epoch where it is short.

    Raises:
        ArgumentError: an argument is wrong, or a row is broken: with its number and file, when iterating.
    """

    def __init__(
        self, table: Table, batch_size: int, *, shuffle: bool = True, seed: int = 0, rank: int = 0,
        size: int = 1, threads: int = 1, prefetch: int = 2, drop_last: bool = False,
    ) -> None:
        check_positive(threads=threads, prefetch=prefetch)
        plan = Plan(len(table), batch_size, shuffle, seed, rank, size, BLOCK, drop_last)
        self._together = max(1, _READ // batch_size)  # batches
        super().__init__(plan, threads, 1 + max(threads, -(-prefetch // self._together)))
        self.table = table

    thread_name = "ringdance-table"

    def parts(self, epoch: Epoch) -> Iterator[list[Part]]:
        """Yield the batches that are read at once."""
        parts = epoch.plan.batches()
        return iter(lambda: list(islice(parts, self._together)), [])

    def prepare(self, epoch: Epoch, part: list[Part]) -> Wait:
        """Give a thread some batches."""
        return epoch.pool.submit(self._read, part, epoch.stop).result

    def _read(self, parts: list[Part], stopped: threading.Event) -> list[TableBatch]:
        """Read the rows of some batches at once."""
        if stopped.is_set():
            return []
        try:
            rows = self.table.read(np.concatenate([part[0] for part in parts]))
        except ArgumentError as error:
            raise ArgumentError(f"{self.plan.where}{error}") from None
        found, start = [], 0
        for numbers, weight, position, count in parts:
            stop = start + len(numbers)
            found.append(TableBatch(*rows.part(start, stop), weight, position, count))
            start = stop
        return found
