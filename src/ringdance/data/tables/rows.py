"""Rows of a table in memory, and their dtype in ``.npy`` files of the format ``rows``."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
BLOCK = 256
"""Rows per block. They stay together when a table is shuffled. The index contains each block's offset."""


PADDING = 32
"""Number of padding bytes after the data, so that parsers may read a few bytes beyond the end."""


class RowError(ValueError):
    """Raised for broken rows. The message says what was expected, without the file and the row number."""


class Rows(NamedTuple):
    """Rows of a table.

    Attributes:
        labels: Shape (n,), float32. 0 or 1.
        ids: Shape (n, fields), int64. Row numbers in the embedding table.
        values: Shape (n, fields), float32. Factors by which the embeddings are multiplied.
    """

    labels: Array
    ids: Array
    values: Array

    def part(self, start: int, stop: int) -> Rows:
        """Return a range of rows, without copying them."""
        return Rows(*(array[start:stop] for array in self))

    @classmethod
    def empty(cls, count: int, fields: int) -> Rows:
        """Allocate uninitialized rows."""
        shape = (count, fields)
        return cls(np.empty(count, np.float32), np.empty(shape, np.int64), np.empty(shape, np.float32))

    @classmethod
    def joined(cls, parts: Sequence[Rows], fields: int) -> Rows:
        """Concatenate the rows of all parts. A single part is returned without a copy."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(arrays) for arrays in zip(cls.empty(0, fields), *parts, strict=True)))

    @classmethod
    def of(cls, array: Array) -> Rows:
        """Return the rows of an array of dtype ``dtype(fields)``."""
        return cls(array["label"], array["ids"].astype(np.int64), array["values"])

    def packed(self) -> Array:
        """Return an array of dtype ``dtype(fields)``, as stored in files of the format ``rows``."""
        array = np.empty(len(self.labels), dtype(self.ids.shape[1]))
        array["label"], array["ids"], array["values"] = self
        return array

    def check(self, table_size: int) -> None:
        """Raise RowError if an id, label or value is invalid."""
        if not len(self.labels):
            return
        if self.ids.view(np.uint64).max(initial=0) >= table_size:  # as uint64, negative ids are huge
            wrong = self.ids[(self.ids < 0) | (self.ids >= table_size)][0]
            raise RowError(f"id {wrong} (numbered from 0) is out of range: expected 0 to {table_size - 1}")
        right = (self.labels >= 0) & (self.labels <= 1)
        if not right.all():
            raise RowError(f"label {self.labels[~right][0]:g}: expected 0 (no click) or 1 (click)")
        if not np.isfinite(self.values.sum()):
            raise RowError("a value is not a finite number")


def by_halves(
    read: Callable[[int, int], Rows], count: int, table_size: int
) -> Iterator[tuple[int, Rows | RowError]]:
    """Read and check rows. All are read in one call, unless broken rows have to be found by bisection.

    Args:
        read: Reads a range of rows, given its start and stop. Raises RowError for broken rows.
        count: Number of rows.
        table_size: Upper bound of the ids, exclusive.

    Yields:
        The number of a range's first row, and its rows. For a range of one broken row, the error.
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
    """Return the dtype of a row in files of the format ``rows``."""
    return np.dtype([("label", "<f4"), ("ids", "<i4", (fields,)), ("values", "<f4", (fields,))])


def header(count: int, kind: np.dtype[Any]) -> bytes:
    """Return the header of a ``.npy`` file with ``count`` elements of dtype ``kind``."""
    memory = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(memory, about)
    return memory.getvalue()
