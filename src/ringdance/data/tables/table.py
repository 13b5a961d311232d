"""A split of a table on disk: files in one of the formats, and the locations of their rows.

Note [The index of a table]: ``train.json`` describes the files of the split ``train``. If rows differ in
length, ``train.npy`` contains file offsets as uint64: for each file in turn, the offset of each block of 256
rows (the first starts after any header), followed by the end of the last block. A file without an index is
scanned for these offsets when it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ringdance.data.index import TABLE, damaged, read_array, read_json, read_npy, write_index
from ringdance.data.open_files import Files, OpenFiles
from ringdance.data.order import Indices
from ringdance.data.tables.formats import FORMATS, format_of, scan
from ringdance.data.tables.lines import NEWLINE
from ringdance.data.tables.rows import BLOCK, PADDING, Array, RowError, Rows, by_halves, dtype
from ringdance.errors import ArgumentError

_LABELS = 1 << 16  # number of rows to read at a time when comparing labels


@dataclass(frozen=True)
class TableFile:
    """One file of a split.

    Attributes:
        name: Path relative to the table's directory.
        rows: Number of rows.
        size: Size in bytes.
        crc32c: CRC-32C of the whole file, or None if another tool wrote it.
    """

    name: str
    rows: int
    size: int
    crc32c: int | None = None


@dataclass(frozen=True)
class Table(Files):
    """One split of a table on disk. Use ``open`` to create an instance.

    Attributes:
        path: Directory of the table.
        split: Name of the split, such as "train".
        format: "rows", "tfrecord", "libsvm" or "csv".
        fields: Number of (id, value) pairs in each row.
        table_size: Number of rows in the embedding table. All ids are below it.
        files: The files, in the order of the rows.
        offsets: See Note [The index of a table]. Empty for the format ``rows``.
    """

    path: Path
    split: str
    format: str
    fields: int
    table_size: int
    files: Sequence[TableFile]
    offsets: Array = field(repr=False)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], split: str = "train", *, table_size: int | None = None,
        format: str | None = None,
    ) -> Table:
        """Open a prepared directory, or a file in one of the formats.

        Args:
            path: A directory with an index, such as ``train.json``, or a file, which is scanned once.
            split: Name of the split whose index to read, if ``path`` is a directory.
            table_size: Number of rows in the embedding table. Required if ``path`` is a file.
            format: Format, if ``path`` is a file. Defaults to a guess from its name or content.

        Raises:
            ArgumentError: The table is missing, or does not match its index or ``table_size``.
        """
        where = Path(path)
        if where.is_dir():
            return cls._by_index(where / f"{split}.json", table_size)
        if not where.exists():
            raise ArgumentError(f"{where}: no such file or directory")
        if table_size is None:
            raise ArgumentError(
                f"{where} is a file without an index. Pass table_size=, the size of the embedding table."
            )
        try:
            with open(where, "rb") as stream:
                name = format or format_of(stream.read(1 << 16), where.suffix)
            count, fields, offsets = scan(where, name)
        except (RowError, ValueError) as error:
            raise ArgumentError(f"{where}: {error}") from None
        file = TableFile(where.name, count, where.stat().st_size)
        return cls(where.parent, split, name, fields, table_size, [file], offsets)

    @classmethod
    def _by_index(cls, index: Path, table_size: int | None) -> Table:
        about = read_json(index, TABLE)
        if table_size not in (None, about["table_size"]):
            raise ArgumentError(
                f"table_size={table_size}: {index.parent} was prepared for {about['table_size']}. Omit it, "
                "or run `ringdance data prepare criteo` again with this --table-size."
            )
        files = [TableFile(**file) for file in about["files"]]
        is_rows = about["format"] == "rows"
        offsets = np.empty(0, np.uint64) if is_rows else read_array(index.with_suffix(".npy"), about)
        return cls(
            index.parent, index.stem, about["format"], about["fields"], about["table_size"], files, offsets
        )

    def write(self) -> None:
        """Write the index. A process that opens it concurrently finds the old index or none."""
        about = {"kind": TABLE, "format": self.format, "fields": self.fields, "table_size": self.table_size}
        files = [asdict(file) for file in self.files]
        offsets = None if self.format == "rows" else self.offsets
        write_index(self.path / f"{self.split}.json", about | {"files": files}, offsets)

    def __len__(self) -> int:
        return int(self._first[-1])

    @cached_property
    def _first(self) -> Array:
        """Row number at which each file starts, followed by the total number of rows."""
        return np.cumsum([0, *(file.rows for file in self.files)])

    @cached_property
    def _begin(self) -> Array:
        """Index in ``offsets`` at which each file's offsets begin."""
        return np.cumsum([0, *map(_offsets, self.files)])

    def read(self, numbers: Indices) -> Rows:
        """Read rows by number. Consecutive rows are read together. Thread-safe.

        Raises:
            ArgumentError: A file is missing or was changed, or a row is broken. The message
                names the file and the row.
        """
        read, parts = self._rows if self.format == "rows" else self._parsed, []
        for at, rows in by_halves(lambda a, b: read(numbers[a:b]), len(numbers), self.table_size):
            if isinstance(rows, RowError):
                ((file, row, _),) = self._runs(numbers[at : at + 1])
                header = self.format == "csv" and self.offsets[self._begin[file]] > 0
                unit = "row" if self.format == "rows" else FORMATS[self.format].unit
                raise ArgumentError(f"{self._name(file)}, {unit} {row + 1 + header}: {rows}") from None
            parts.append(rows)
        return Rows.joined(parts, self.fields)

    def only_label(self) -> float | None:
        """Return the label that all rows share, or None. Reading stops as soon as a label differs."""
        first = None
        for start in range(0, len(self), _LABELS):
            labels = self.read(np.arange(start, min(start + _LABELS, len(self)))).labels
            first = labels[0] if first is None else first
            if (labels != first).any():
                return None
        return first if first is None else float(first)

    def _rows(self, numbers: Indices) -> Rows:
        rows, at = Rows.empty(len(numbers), self.fields), 0
        for file, start, stop in self._runs(numbers):
            mapped = self._mapped(file)[start:stop]
            part = rows.part(at, at := at + stop - start)
            part.labels[:], part.ids[:], part.values[:] = mapped["label"], mapped["ids"], mapped["values"]
        return rows

    def _parsed(self, numbers: Indices) -> Rows:
        """Locate the rows within their blocks, and parse all of them in one call."""
        form = FORMATS[self.format]
        pieces: list[Array] = []
        bounds: list[Array] = []
        size = 0
        for file, start, stop in self._runs(numbers):
            first, last = start // BLOCK, -(-stop // BLOCK)
            offsets = self.offsets[self._begin[file] :]
            data = self._mapped(file)[int(offsets[first]) : int(offsets[last])]
            ends = form.bounds(data)
            if len(ends) - 1 != min(last * BLOCK, self.files[file].rows) - first * BLOCK:
                raise ArgumentError(
                    f"{self._name(file)}: bytes {offsets[first]} to {offsets[last]} contain {len(ends) - 1} "
                    "rows, which does not match the index. Copy the file again, or prepare it again."
                )
            ends = ends[start - first * BLOCK : stop - first * BLOCK + 1]
            pieces.append(data[ends[0] : ends[-1]])
            bounds.append(ends[:-1] + (size - ends[0]))
            size += len(pieces[-1])
            if form.unit == "line" and pieces[-1][-1] != NEWLINE:  # the last line may lack its newline
                pieces.append(np.array([NEWLINE], np.uint8))
                size += 1
        joined = np.concatenate([*pieces, np.zeros(PADDING, np.uint8)])
        return form.parse(joined, np.concatenate([*bounds, [size]]), self.fields, self.table_size)

    def _runs(self, numbers: Indices) -> list[tuple[int, int, int]]:
        """Group row numbers into runs of consecutive rows: (file, start, stop), relative to the file."""
        if not len(numbers):
            return []
        if not 0 <= numbers.min() <= numbers.max() < len(self):
            raise ArgumentError(f"{self.path}: {self.split} has only rows 0 to {len(self) - 1}.")
        files = np.searchsorted(self._first, numbers, "right") - 1
        starts = np.flatnonzero(np.append(True, (np.diff(numbers) != 1) | (np.diff(files) != 0)))
        files, lengths = files[starts], np.diff(np.append(starts, len(numbers)))
        local = numbers[starts] - self._first[files]
        return list(zip(files.tolist(), local.tolist(), (local + lengths).tolist(), strict=True))

    def _name(self, file: int) -> Path:
        return self.path / self.files[file].name

    @cached_property
    def _mapped(self) -> OpenFiles[Array]:
        """The files' rows or bytes, mapped into memory."""
        return OpenFiles(self._name, self._map, len(self.files))

    def _map(self, file: int, name: Path) -> Array:
        size = name.stat().st_size
        if size != self.files[file].size:
            raise ArgumentError(f"{name} has {size} bytes, but its index says {self.files[file].size}.")
        if self.format != "rows":
            return np.memmap(name, np.uint8, "r").view(np.ndarray)
        array = read_npy(name)
        if array.dtype != dtype(self.fields) or len(array) != self.files[file].rows:
            expected = f"{self.files[file].rows} rows of {self.fields} fields"
            raise damaged(name, f"it has {len(array)} rows of {array.dtype}, but its index says {expected}")
        return array.view(np.ndarray)


def _offsets(file: TableFile) -> int:
    """Return how many offsets the index holds for a file. See Note [The index of a table]."""
    return -(-file.rows // BLOCK) + 1
