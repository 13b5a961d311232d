"""Click logs as they come: read in chunks of whole rows, and parsed without the broken ones."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ringdance.data.tables import criteo, examples, formats, lines
from ringdance.data.tables.rows import Array, RowError, Rows
from ringdance.errors import ArgumentError

_HEAD = 1 << 16  # bytes in which a first line ends
_SHARE = 100  # a chunk with more broken rows than one in so many is taken for another format


@dataclass(frozen=True)
class SourceFile:
    """A file of click logs.

    Attributes:
        path: of the file; ``.gz`` is decompressed.
        group: 0, or 1 for a file of the validation: rows are shuffled among those of their group.
        format: "rows", "tfrecord", "libsvm" or "csv".
        fields: pairs of each row.
        header: bytes of the first line if that names columns.
        size: in bytes.
        changed: time of its last change, in nanoseconds.
    """

    path: str
    group: int
    format: str
    fields: int
    header: int
    size: int
    changed: int

    @classmethod
    def of(cls, path: Path, group: int) -> SourceFile:
        """Look at a file.

        Raises:
            ArgumentError: it has no rows in any of the formats.
        """
        about, stem = path.stat(), path.with_suffix("") if path.suffix == ".gz" else path
        try:
            with _open(str(path))[0] as stream:
                head = stream.read(_HEAD)
            format = formats.format_of(head, stem.suffix)
            data = np.frombuffer(head, np.uint8)
            header = criteo.header_size(data) if format == "csv" else 0
            if format == "rows":
                _, fields, _ = formats.scan(path, format)
            else:
                fields = formats.FORMATS[format].fields(data[header:])
        except (RowError, ValueError, IndexError, struct.error) as error:
            raise ArgumentError(f"{path}: no rows of click logs at its beginning: {error}") from None
        return cls(str(path), group, format, fields, header, about.st_size, about.st_mtime_ns)

    def units(self, size: int) -> list[int]:
        """Return the chunks that can be read by themselves, or only -1: for all, one after the other."""
        whole = self.path.endswith(".gz") or self.format in ("rows", "tfrecord")
        return [-1] if whole else list(range(-(-self.size // size)))

    def read(self, unit: int, size: int) -> Iterator[tuple[int, Any, int]]:
        """Yield chunks: number, whole rows (``rows``: an array), bytes read on disk."""
        if self.format == "rows":
            array = np.load(self.path, mmap_mode="r")
            step = max(1, size // array.itemsize)
            for at in range(0, len(array), step):
                yield at // step, array[at : at + step], min(step, len(array) - at) * array.itemsize
            return
        stream, raw = _open(self.path)
        with stream, raw:
            first = max(unit, 0)
            if first:
                stream.seek(first * size - 1)
                stream.readline()  # it belongs to the chunk that it begins in
            else:
                stream.read(self.header)
            at = raw.tell()
            if self.format == "tfrecord":
                pieces = examples.pieces(stream, size)
            else:
                pieces = lines.pieces(stream, size, (first + 1) * size - stream.tell())
            for number, some in enumerate(islice(pieces, None if unit < 0 else 1), first):
                yield number, some, raw.tell() - at
                at = raw.tell()


def _open(path: str) -> tuple[BinaryIO, BinaryIO]:
    """Open a file: a stream of its contents, and the file on disk, which tells how far it is read."""
    raw = open(path, "rb")  # noqa: SIM115
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw, raw  # type: ignore[return-value]


def parse(
    file: SourceFile, data: Any, fields: int, table_size: int, allowed: int
) -> tuple[Rows, Array, list[tuple[int, str]]]:
    """Parse a chunk.

    Returns:
        Rows that are not broken; shape (n,): their numbers in the chunk; number of each other row, and what
        is wrong.

    Raises:
        ArgumentError: more than `allowed` rows are broken, and more than one in a hundred.
    """
    total, parsed = formats.parse(file.format, data, fields, table_size)
    good: list[Rows] = []
    numbers, broken = [np.empty(0, np.int64)], []
    for row, found in parsed:
        if not isinstance(found, RowError):
            good.append(found)
            numbers.append(np.arange(row, row + len(found.labels)))
            continue
        broken.append((row, str(found)))
        if len(broken) > max(allowed, total // _SHARE):
            raise ArgumentError(
                f"{file.path}: more than {len(broken) - 1} of {total} rows are broken (allow more with "
                f"--max-broken, if it is of the format {file.format}); the last one: {found}"
            )
    return Rows.joined(good, fields), np.concatenate(numbers), broken
