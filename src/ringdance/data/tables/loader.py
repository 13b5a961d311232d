"""Loader that yields batches of a table's rows. Threads prepare the batches in advance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ringdance.data.batches import Batches, Epoch, Wait
from ringdance.data.order import BatchPlan, Indices, check_positive
from ringdance.data.tables.rows import BLOCK, Array
from ringdance.data.tables.table import Table
from ringdance.errors import ArgumentError

# Number of rows to parse per call, rounded to whole batches. Parsing a few rows takes as long as hundreds.
_READ = 4096

Part = tuple[Indices, float, int, int]


@dataclass
class TableBatch:
    """One rank's share of a global batch.

    Attributes:
        labels: Shape (n,), float32.
        ids: Shape (n, fields), int64. Row numbers in the embedding table.
        values: Shape (n, fields), float32. Factors by which the embeddings are multiplied.
        weight: Factor for this rank's mean loss: ``n * size / count`` on ``size`` ranks. With it, the average
            of the losses over all ranks is the mean over all rows in the global batch. 0 on a rank without
            rows, whose batch consists of one padding row.
        position: Number of the epoch's rows that all ranks together have consumed after this batch.
        count: Number of rows in the global batch.
    """

    labels: Any
    ids: Any
    values: Any
    weight: float
    position: int
    count: int

    def converted(self, make: Callable[[Array], Any]) -> TableBatch:
        """Return a copy whose labels, ids and values are converted with ``make``."""
        return replace(self, labels=make(self.labels), ids=make(self.ids), values=make(self.values))


class TableLoader(Batches):
    """Yields batches of a table's rows. Each iteration yields the rest of the current epoch.

    An epoch is shuffled by blocks of 256 consecutive rows, in an order drawn from ``seed`` and the epoch
    number. It is the same for all formats and any number of ranks. Each rank reads only its share.

    Args:
        table: The table to read.
        batch_size: Rows per batch on each rank.
        shuffle: If True, shuffle the blocks differently in each epoch. Otherwise, keep the files' order.
        seed: Random seed of the order.
        rank: This process's rank. Each rank gets its share of each global batch.
        size: Number of ranks.
        threads: Number of threads that read and parse rows.
        prefetch: Minimum number of batches to prepare ahead.
        drop_last: If True, skip an epoch's last global batch if it is short.

    Raises:
        ArgumentError: An argument is invalid, or a row that an iteration reads is broken. For a broken row,
            the message names the row and the file.
    """

    def __init__(
        self, table: Table, batch_size: int, *, shuffle: bool = True, seed: int = 0, rank: int = 0,
        size: int = 1, threads: int = 1, prefetch: int = 2, drop_last: bool = False,
    ) -> None:
        check_positive(threads=threads, prefetch=prefetch)
        plan = BatchPlan(len(table), batch_size, shuffle, seed, rank, size, BLOCK, drop_last)
        self._together = max(1, _READ // batch_size)  # number of batches per read
        super().__init__(plan, threads, 1 + max(threads, -(-prefetch // self._together)))
        self.table = table

    thread_name = "ringdance-table"

    def parts(self, epoch: Epoch) -> Iterator[list[Part]]:
        """Yield the arguments for ``prepare``: groups of batches that are read together."""
        parts = epoch.plan.batches()
        return iter(lambda: list(islice(parts, self._together)), [])

    def prepare(self, epoch: Epoch, part: list[Part]) -> Wait:
        """Submit a group of batches to a thread, which reads their rows."""
        return epoch.pool.submit(self._read, part, epoch.stop).result

    def _read(self, parts: list[Part], stopped: threading.Event) -> list[TableBatch]:
        """Read the rows for a group of batches together."""
        if stopped.is_set():
            return []
        try:
            rows = self.table.read(np.concatenate([part[0] for part in parts]))
        except ArgumentError as error:
            raise ArgumentError(f"{self.plan.where}{error}") from None
        batches, start = [], 0
        for numbers, weight, position, count in parts:
            stop = start + len(numbers)
            batches.append(TableBatch(*rows.part(start, stop), weight, position, count))
            start = stop
        return batches
