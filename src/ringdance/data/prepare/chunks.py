"""Click logs as they come: read in chunks of whole rows, and parsed without the broken ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np

from ringdance.data import tfrecord
from ringdance.data.tables import criteo
from ringdance.data.tables.formats import FORMATS, SUFFIXES, format_of
from ringdance.data.tables.rows import PADDING, Array, RowError, Rows
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
            if stem.suffix == ".npy":
                fields = np.load(path, mmap_mode="r")["ids"].shape[1]
                return cls(str(path), group, "rows", fields, 0, about.st_size, about.st_mtime_ns)
            with _open(str(path))[0] as stream:
                data = np.frombuffer(stream.read(_HEAD), np.uint8)
            if stem is path or stem.suffix in SUFFIXES:
                format = format_of(stem)
            else:
                format = "libsvm" if b":" in bytes(data).split(b"\n")[0] else "csv"
            header = criteo.header_size(data) if format == "csv" else 0
            first = data[header:]
            if format == "tfrecord":
                first = first[: int(first[:8].view("<u8")[0]) + 16]
            else:
                first = first[: FORMATS[format].bounds(first)[1]]
            fields = FORMATS[format].fields(first)
        except (RowError, ValueError, IndexError) as error:
            raise ArgumentError(f"{path}: no rows of click logs at its beginning: {error}") from None
        return cls(str(path), group, format, fields, header, about.st_size, about.st_mtime_ns)

    def units(self, size: int) -> list[int]:
        """Return the chunks that can be read by themselves, or only -1: for all, one after the other."""
        whole = self.path.endswith(".gz") or self.format in ("rows", "tfrecord")
        return [-1] if whole else list(range(-(-self.size // size)))

    def read(self, unit: int, size: int) -> Iterator[tuple[int, Any, int]]:
        """Yield chunks: number, whole rows (an array for the format ``rows``), bytes read on disk."""
        if self.format == "rows":
            array = np.load(self.path, mmap_mode="r")
            step = max(1, size // array.itemsize)
            for at in range(0, len(array), step):
                yield at // step, array[at : at + step], min(step, len(array) - at) * array.itemsize
            return
        stream, raw = _open(self.path)
        with stream, raw:
            if unit > 0:
                stream.seek(unit * size - 1)
                stream.readline()  # it belongs to the chunk that it begins in
            at = raw.tell()
            for number in count() if unit < 0 else (unit,):
                some = _records(stream, size) if self.format == "tfrecord" else _lines(stream, size, number)
                if some is None:
                    return
                if self.format != "tfrecord":
                    some = some[0 if number else self.header :].replace(b"\r\n", b"\n")
                yield number, some, raw.tell() - at
                at = raw.tell()


def _open(path: str) -> tuple[IO[bytes], IO[bytes]]:
    """Open a file: a stream of its contents, and the file on disk, which tells how far it is read."""
    raw = open(path, "rb")  # noqa: SIM115
    return gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw, raw  # type: ignore[return-value]


def _lines(stream: IO[bytes], size: int, number: int) -> bytes | None:
    """Read the lines that begin in a chunk; None at the end."""
    wanted = max(0, (number + 1) * size - stream.tell())
    data = stream.read(wanted)
    if wanted and not data:
        return None
    if data and data[-1:] != b"\n":
        data += stream.readline()
    return data + b"\n" if data and data[-1:] != b"\n" else data


def _records(stream: IO[bytes], size: int) -> bytes | None:
    """Read records of at least so many bytes; None at the end."""
    parts, total = [], 0
    while total < size and (head := stream.read(12)):
        body = b""
        if tfrecord.is_head(head):
            length = int.from_bytes(head[:8], "little") + 4
            body = stream.read(length)
        if not body or len(body) < length:
            raise ArgumentError(f"{stream.name}: damaged, or no TFRecord file: a record is not complete")
        parts += [head, body]
        total += len(head) + len(body)
    return b"".join(parts) or None


@dataclass(frozen=True)
class Parsed:
    """The rows of a chunk.

    Attributes:
        rows: those that are not broken.
        numbers: shape (n,): their numbers in the chunk.
        broken: number of each other row, and what is wrong.
        count: rows of both kinds.
        lines: where lines begin in `data`, and their end; empty for records.
        data: the lines, with commas.
    """

    rows: Rows
    numbers: Array
    broken: list[tuple[int, str]]
    count: int
    lines: Array
    data: bytes


def parse(file: SourceFile, data: Any, fields: int, table_size: int, allowed: int) -> Parsed:
    """Parse a chunk; broken rows are found by halves.

    Raises:
        ArgumentError: more than `allowed` rows are broken, and more than one in a hundred.
    """
    if file.format == "rows":
        starts = np.arange(len(data) + 1)
        piece: Callable[[int, int], Rows] = lambda a, b: Rows.of(data[a:b])  # noqa: E731
    else:
        form = FORMATS[file.format]
        data = data.translate(_COMMAS) if file.format == "csv" else data
        array = np.frombuffer(data + bytes(PADDING), np.uint8)
        starts = form.bounds(array[: len(data)])

        def piece(a: int, b: int) -> Rows:
            some = np.concatenate([array[starts[a] : starts[b]], np.zeros(PADDING, np.uint8)])
            return form.parse(some, starts[a : b + 1] - starts[a], fields, table_size)

    total, good, numbers, broken = len(starts) - 1, [Rows.empty(0, fields)], [np.empty(0, np.int64)], []
    todo = [(0, total)] if total else []
    while todo:
        begin, end = todo.pop()
        try:
            rows = piece(begin, end)
            rows.check(table_size)
            good.append(rows)
            numbers.append(np.arange(begin, end))
        except RowError as error:
            if end - begin > 1:
                middle = (begin + end) // 2
                todo += [(middle, end), (begin, middle)]
                continue
            broken.append((begin, str(error)))
            if len(broken) > max(allowed, total // _SHARE):
                raise ArgumentError(
                    f"{file.path}: more than {len(broken) - 1} of {total} rows are broken (allow more with "
                    f"--max-broken, if it is of the format {file.format}); the last one: {error}"
                ) from None
    joined = Rows(*(np.concatenate(arrays) for arrays in zip(*good, strict=True)))
    return Parsed(joined, np.concatenate(numbers), broken, total, starts, data)


_COMMAS = bytes.maketrans(b"\t", b",")
