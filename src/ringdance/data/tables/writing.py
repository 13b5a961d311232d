"""Write a table's files, in the format ``rows`` or as TFRecords, and their index."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringdance.data.files import ShardWriter
from ringdance.data.tables import examples
from ringdance.data.tables.formats import scan
from ringdance.data.tables.rows import Array, Rows, dtype, header
from ringdance.data.tables.table import Table, TableFile
from ringdance.errors import ArgumentError

ENDS = {"rows": "npy", "tfrecord": "tfrecord"}
"""File name extensions, by format."""


@dataclass(frozen=True)
class Written:
    """A complete file of a table.

    Attributes:
        file: The file's entry for the index.
        offsets: Offsets of the file's blocks of rows. See Note [The index of a table].
    """

    file: TableFile
    offsets: Array


class TableWriter(AbstractContextManager["TableWriter"]):
    """Writes a file of a table. The file appears under its name only when it is complete.

    Args:
        path: Path of the file.
        format: "rows" or "tfrecord".
        count: Number of rows that will be written. The format ``rows`` stores it in the file's header.
        fields: Number of (id, value) pairs in each row.
    """

    def __init__(self, path: Path, format: str, count: int, fields: int) -> None:
        if format not in ENDS:
            raise ArgumentError(f"format={format!r} is not supported. Use one of {', '.join(ENDS)}.")
        self.path, self.format, self.count = path, format, count
        self._file, self._rows = ShardWriter(path), 0
        if format == "rows":
            self._file.write(header(count, dtype(fields)))

    def write(self, rows: Rows) -> None:
        """Append rows."""
        self._file.write(rows.packed().tobytes() if self.format == "rows" else examples.encode(rows))
        self._rows += len(rows.labels)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Complete the file, or remove it after an error."""
        wrong = None
        if error is None and self._rows != self.count:
            wrong = error = ArgumentError(f"{self.path} has {self._rows} rows instead of {self.count}.")
        self._file.__exit__(kind, error, trace)
        if wrong is not None:
            raise wrong

    @property
    def written(self) -> Written:
        """The file's entry for the index. Available after the ``with`` statement."""
        file = TableFile(self.path.name, self._rows, self._file.size, self._file.crc32c)
        empty = not self._rows and self.format != "rows"
        return Written(file, np.zeros(1, np.uint64) if empty else scan(self.path, self.format)[2])


def write_index(
    directory: Path, split: str, format: str, fields: int, table_size: int, files: Sequence[Written]
) -> Table:
    """Write a split's index, given its finished files. Returns the table."""
    offsets = np.concatenate([written.offsets for written in files])
    table = Table(directory, split, format, fields, table_size, [written.file for written in files], offsets)
    table.write()
    return table
