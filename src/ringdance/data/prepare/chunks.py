"""Read click logs in chunks of whole rows, and parse all rows that are not broken."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ringdance.data.files import file_crc32c, needed
from ringdance.data.tables import criteo, examples, formats, lines
from ringdance.data.tables.rows import Array, RowError, Rows
from ringdance.errors import ArgumentError

_COMPRESSED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile,
    ".zst": lambda raw: io.BufferedReader(needed("pyarrow").CompressedInputStream(raw, "zstd")),
}  # fmt: skip
PARQUET = ".parquet"
_PARQUET_ROW = 256  # approximate size of a row as text, in bytes
_HEAD = 1 << 16  # number of bytes to inspect at the start of a file; they must include the first line
_SHARE = 100  # more than one broken row in 100 suggests that the format was not recognized


@dataclass(frozen=True)
class SourceFile:
    """A click-log file.

    Attributes:
        path: Path of the file. Its suffix determines how the file is decompressed.
        group: 1 for a file of the validation split, otherwise 0. Rows are shuffled within their group.
        format: "rows", "tfrecord", "libsvm" or "csv". Parquet is converted to "csv".
        fields: Number of (id, value) pairs in each row.
        header: Size in bytes of the first line if it names columns, otherwise 0.
        size: Size in bytes.
        changed: Modification time in nanoseconds.
        crc32c: CRC-32C according to the index of a prepared data set, or None for other files.
    """

    path: str
    group: int
    format: str
    fields: int
    header: int
    size: int
    changed: int
    crc32c: int | None = field(default=None, compare=False)

    @classmethod
    def of(cls, path: Path, group: int, crc32c: int | None = None) -> SourceFile:
        """Inspect a file to determine its format and its number of fields.

        Raises:
            ArgumentError: The file has no rows in any of the formats, or is not a regular file.
        """
        if not path.is_file():
            raise ArgumentError(f"{path} is a broken link or not a regular file. Remove or replace it.")
        about, ending = path.stat(), plain(path).suffix.lower()
        try:
            with _open(str(path)) as (stream, _):
                head = stream.read(_HEAD)
            if ending == PARQUET:
                head = next(_of_parquet(path, 1), (b"", 0))[0]
            format = formats.format_of(head, ending if ending != PARQUET else ".csv")
            data = np.frombuffer(head, np.uint8)
            header = criteo.header_size(data) if format == "csv" else 0
            if len(head) == header:
                raise RowError("it is empty")
            if format == "rows":
                _, fields, _ = formats.scan(path, format)
            else:
                fields = formats.FORMATS[format].fields(data[header:])
        except (RowError, ValueError, IndexError, struct.error) as error:
            raise ArgumentError(f"{path} is not a click log ({error}). Leave it out or replace it.") from None
        return cls(str(path), group, format, fields, header, about.st_size, about.st_mtime_ns, crc32c)

    def units(self, size: int) -> list[int]:
        """Return the chunk numbers, or [-1] if the chunks can only be read in sequence."""
        ending = Path(self.path).suffix.lower()
        whole = ending in (*_COMPRESSED, PARQUET) or self.format in ("rows", "tfrecord")
        return [-1] if whole else list(range(-(-self.size // size)))

    def read(self, unit: int, size: int) -> Iterator[tuple[int, Any, int]]:
        """Yield each chunk's number, its rows (an array for the format ``rows``), and its size on disk.

        Raises:
            ArgumentError: The file is damaged, or has changed since it was inspected.
        """
        if self.crc32c is not None and unit <= 0 and file_crc32c(Path(self.path)) != self.crc32c:
            raise ArgumentError(
                f"{self.path} is damaged: its checksum differs from the one in its index. Copy it again."
            )
        for chunk in self._rows(size) if self.format == "rows" else self._pieces(unit, size):
            self._check_same()
            yield chunk
        self._check_same()

    def _check_same(self) -> None:
        about = os.stat(self.path)
        if (about.st_size, about.st_mtime_ns) != (self.size, self.changed):
            raise ArgumentError(f"{self.path} changed during the run. Start again with --overwrite.")

    def _rows(self, size: int) -> Iterator[tuple[int, Any, int]]:
        about = np.load(self.path, mmap_mode="r")
        step = max(1, size // about.itemsize)
        for at in range(0, len(about), step):  # read, not mapped, to avoid SIGBUS if the file shrinks
            begin, count = about.offset + at * about.itemsize, min(step, len(about) - at)
            rows = np.fromfile(self.path, about.dtype, count, offset=begin)
            yield at // step, rows, rows.nbytes

    def _pieces(self, unit: int, size: int) -> Iterator[tuple[int, bytes, int]]:
        if self.path.lower().endswith(PARQUET):
            for number, (text, share) in enumerate(_of_parquet(Path(self.path), size)):
                yield number, text, round(self.size * share)
            return
        with _open(self.path) as (stream, raw):
            first, at = max(unit, 0), 0
            if first:
                stream.seek(first * size - 1)
                stream.readline()  # skip a line that begins in the previous chunk
                begin = at = raw.tell()
            else:
                begin = len(stream.read(self.header))
            if self.format == "tfrecord":
                pieces = examples.pieces(stream, size)
            else:
                pieces = lines.pieces(stream, size, (first + 1) * size - begin)
            for number, piece in enumerate(islice(pieces, None if unit < 0 else 1), first):
                yield number, piece, raw.tell() - at
                at = raw.tell()


@contextmanager
def _open(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file. Yields a stream of its decompressed contents, and the file on disk.

    Raises:
        ArgumentError: The compressed data is damaged or incomplete.
    """
    with open(path, "rb") as raw:
        try:
            yield _COMPRESSED.get(Path(path).suffix.lower(), lambda raw: raw)(raw), raw
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # an I/O error, not damaged data
                raise
            raise ArgumentError(f"{path} is damaged or incomplete: {error}") from None


def plain(path: Path) -> Path:
    """Return a path without its compression suffix, if it has one."""
    return path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path


def _of_parquet(path: Path, size: int) -> Iterator[tuple[bytes, float]]:
    """Yield about ``size`` bytes of a Parquet file's rows as text, with their share of all rows.

    Raises:
        ArgumentError: The file is damaged, or lacks one of Criteo's columns.
    """
    parquet, csv = needed("pyarrow.parquet"), needed("pyarrow.csv")
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    try:
        file = parquet.ParquetFile(path)
        names = {name.lower(): name for name in file.schema_arrow.names}
        order = [names.get(name.lower(), name) for name in criteo.COLUMNS]
        for batch in file.iter_batches(max(1, size // _PARQUET_ROW), columns=order):
            text = io.BytesIO()
            csv.write_csv(batch.select(order), text, options)
            yield text.getvalue(), batch.num_rows / file.metadata.num_rows
    except (ValueError, LookupError, NotImplementedError, OSError) as error:
        raise ArgumentError(f"{path} is damaged or lacks a column (label, I1, ..., C26): {error}") from None


def parse(
    file: SourceFile, data: Any, fields: int, table_size: int, allowed: int
) -> tuple[Rows, Array, list[tuple[int, str]]]:
    """Parse a chunk.

    Returns:
        The valid rows, their row numbers in the chunk, and the row number and error of each broken row.

    Raises:
        ArgumentError: More than ``allowed`` rows are broken, and more than one in a hundred.
    """
    total, parsed = formats.parse(file.format, data, fields, table_size)
    good: list[Rows] = []
    numbers, broken = [np.empty(0, np.int64)], []
    for row, result in parsed:
        if not isinstance(result, RowError):
            good.append(result)
            numbers.append(np.arange(row, row + len(result.labels)))
            continue
        broken.append((row, str(result)))
        if len(broken) > max(allowed, total // _SHARE):
            raise ArgumentError(
                f"{file.path}: more than {len(broken) - 1} of {total} rows are broken. Last error: {result}. "
                f"If the file's format really is {file.format}, increase --max-broken."
            )
    return Rows.joined(good, fields), np.concatenate(numbers), broken
