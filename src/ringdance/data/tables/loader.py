"""Batches of a table in the order of an epoch, read ahead by threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ringdance.data.batches import Batches
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
        super().__init__(Plan(len(table), batch_size, shuffle, seed, rank, size, BLOCK, drop_last))
        self.table, self.threads, self.prefetch = table, threads, prefetch
        self._together = max(1, _READ // batch_size)  # batches
        self._stops: set[threading.Event] = set()

    def batches(self) -> Iterator[TableBatch]:
        """Yield the batches of the rest of the epoch as NumPy arrays."""
        parts = self.plan.batches()
        ahead = max(self.threads, -(-self.prefetch // self._together))
        stop = threading.Event()
        self._stops.add(stop)
        pool = ThreadPoolExecutor(self.threads, "ringdance-table")
        pending: deque[Any] = deque()
        try:
            while True:
                while len(pending) <= ahead and (some := list(islice(parts, self._together))):
                    pending.append(pool.submit(self._read, some))
                if not pending:
                    break
                for batch in pending.popleft().result():
                    if stop.is_set():
                        return
                    yield batch
        finally:
            self._stops.discard(stop)
            for one in pending:
                one.cancel()
            pool.shutdown()  # cancel_futures= fails in an iterator that is left until the interpreter ends

    def close(self) -> None:
        """End the iterations that are still under way; their threads end when they are asked for more."""
        for stop in list(self._stops):
            stop.set()

    def _read(self, parts: list[Part]) -> list[TableBatch]:
        """Read the rows of some batches at once."""
        try:
            rows = self.table.read(np.concatenate([part[0] for part in parts]))
        except ArgumentError as error:
            raise ArgumentError(f"rank {self.plan.rank}: {error}") from None
        found, start = [], 0
        for numbers, weight, position, count in parts:
            stop = start + len(numbers)
            found.append(TableBatch(*rows.part(start, stop), weight, position, count))
            start = stop
        return found
