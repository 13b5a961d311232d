"""Rows of a table in memory, and the format ``rows``: a ``.npy`` file that needs no parsing."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
BLOCK = 256
"""Rows that stay together where a table is shuffled, and whose place in a file its index holds."""


PADDING = 32
"""Bytes behind those that are parsed, so that reading a few beyond the end needs no check."""


class RowError(ValueError):
    """Rows are broken: says what was expected. A table adds the file and the row."""


class Rows(NamedTuple):
    """Rows of a table.

    Attributes:
        labels: shape (n,), float32: 0 or 1.
        ids: shape (n, fields), int64: rows of the table of embeddings.
        values: shape (n, fields), float32: their factors.
    """

    labels: Array
    ids: Array
    values: Array

    def part(self, start: int, stop: int) -> Rows:
        """Return some rows, without a copy."""
        return Rows(*(array[start:stop] for array in self))

    @classmethod
    def empty(cls, count: int, fields: int) -> Rows:
        """Return memory for rows."""
        shape = (count, fields)
        return cls(np.empty(count, np.float32), np.empty(shape, np.int64), np.empty(shape, np.float32))

    @classmethod
    def joined(cls, parts: Sequence[Rows], fields: int) -> Rows:
        """Return the rows of all parts; without a copy if there is one."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(arrays) for arrays in zip(cls.empty(0, fields), *parts, strict=True)))

    @classmethod
    def of(cls, array: Array) -> Rows:
        """Return the rows of an array of dtype ``dtype(fields)``."""
        return cls(array["label"], array["ids"].astype(np.int64), array["values"])

    def packed(self) -> Array:
        """Return them as an array of dtype ``dtype(fields)``: as files of the format ``rows`` hold them."""
        array = np.empty(len(self.labels), dtype(self.ids.shape[1]))
        array["label"], array["ids"], array["values"] = self
        return array

    def check(self, table_size: int) -> None:
        """Raise RowError for what no row may have: the first such id, label or value."""
        if not len(self.labels):
            return
        if self.ids.view(np.uint64).max(initial=0) >= table_size:  # negative ones are large there
            wrong = self.ids[(self.ids < 0) | (self.ids >= table_size)][0]
            raise RowError(f"id {wrong} (from 0) is beyond the table: expected 0 to {table_size - 1}")
        right = (self.labels >= 0) & (self.labels <= 1)
        if not right.all():
            raise RowError(f"label {self.labels[~right][0]:g}: expected 0 (no click) or 1 (click)")
        if not np.isfinite(self.values.sum()):
            raise RowError("a value is not a finite number")


def by_halves(
    read: Callable[[int, int], Rows], count: int, table_size: int
) -> Iterator[tuple[int, Rows | RowError]]:
    """Read rows and check them, all at once if none is broken; broken ones are found by halves.

    Args:
        read: takes begin and end.
        count: of all rows.
        table_size: ids are below it.

    Yields:
        The number of the first row, and the rows; or for a broken one what is wrong.
    """
    todo = [(0, count)] if count else []
    while todo:
        begin, end = todo.pop()
        try:
            rows = read(begin, end)
            rows.check(table_size)
            yield begin, rows
        except RowError as error:
            middle = (begin + end) // 2
            if middle == begin:
                yield begin, error
            else:
                todo += [(middle, end), (begin, middle)]


def dtype(fields: int) -> np.dtype[np.void]:
    """Return the dtype of a row in a file of the format ``rows``."""
    return np.dtype([("label", "<f4"), ("ids", "<i4", (fields,)), ("values", "<f4", (fields,))])


def header(count: int, kind: np.dtype[Any]) -> bytes:
    """Return what a ``.npy`` file with so many elements of a dtype begins with."""
    memory = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(memory, about)
    return memory.getvalue()
