"""The formats of table files: how to detect, scan and parse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data import tfrecord
from ringdance.data.tables import criteo, examples, lines
from ringdance.data.tables.rows import BLOCK, PADDING, Array, RowError, Rows, by_halves, dtype

SUFFIXES = {
    ".npy": "rows", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".libsvm": "libsvm", ".svm": "libsvm",
    ".svmlight": "libsvm", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
_CHUNK = 1 << 24  # number of bytes to scan at a time


@dataclass(frozen=True)
class Format:
    """Functions that find and parse the rows of a file format. Not needed for ``rows``.

    Attributes:
        unit: What a row is called in error messages.
        bounds: Returns the offset of each row and the end of the last one, given the bytes of whole rows.
        fields: Returns the number of fields in the first row, given bytes that begin with it.
        parse: Parses rows, given their bytes (followed by padding), their bounds, the number of fields and
            the table size.
    """

    unit: str
    bounds: Callable[[Array], Array]
    fields: Callable[[Array], int]
    parse: Callable[[Array, Array, int, int], Rows]


FORMATS = {
    "tfrecord": Format("record", examples.bounds, examples.fields, examples.parse),
    "libsvm": Format("line", lines.bounds, lines.libsvm_fields, lines.parse_libsvm),
    "csv": Format("line", lines.bounds, lambda row: criteo.FIELDS, criteo.parse),
}


def format_of(head: bytes, suffix: str = "") -> str:
    """Determine a file's format from its suffix or, failing that, from its first bytes."""
    if suffix.lower() in SUFFIXES:
        return SUFFIXES[suffix.lower()]
    line = head.partition(b"\n")[0]
    text = "libsvm" if b":" in line and b"\t" not in line else "csv"
    return "tfrecord" if tfrecord.is_head(head[:12]) else text


def parse(
    format: str, data: Any, fields: int, table_size: int
) -> tuple[int, Iterator[tuple[int, Rows | RowError]]]:
    """Parse whole rows. ``data`` is an array for the format ``rows``, otherwise bytes.

    Returns:
        The number of rows, and an iterator over the parsed rows and errors, as from ``by_halves``.
    """
    if format == "rows":
        return len(data), by_halves(lambda a, b: Rows.of(data[a:b]), len(data), table_size)
    array = np.frombuffer(data, np.uint8)
    starts = FORMATS[format].bounds(array)

    def read(begin: int, end: int) -> Rows:
        padded = np.append(array[starts[begin] : starts[end]], np.zeros(PADDING, np.uint8))
        return FORMATS[format].parse(padded, starts[begin : end + 1] - starts[begin], fields, table_size)

    return len(starts) - 1, by_halves(read, len(starts) - 1, table_size)


def scan(path: Path, name: str) -> tuple[int, int, Array]:
    """Scan a file. Returns its numbers of rows and fields, and offsets. See Note [The index of a table].

    Raises:
        RowError: The file has no rows or another format, or the format ``name`` is unknown.
    """
    if name != "rows" and name not in FORMATS:
        raise RowError(f"format={name!r} is not supported. Use one of rows, {', '.join(FORMATS)}.")
    if not path.stat().st_size:
        raise RowError("it is empty")
    if name == "rows":
        array = np.lib.format.open_memmap(path, mode="r")  # unlike np.load, rejects .npz files
        fields = array["ids"].shape[1] if array.dtype.names else 0
        if array.ndim != 1 or array.dtype != dtype(fields):
            raise RowError(f"its dtype is {array.dtype} instead of {dtype(39)}, with any number of fields")
        return len(array), fields, np.empty(0, np.uint64)
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    begin = criteo.header_size(data[: 1 << 16]) if name == "csv" else 0
    rows, offsets = examples.scan(data) if name == "tfrecord" else _line_blocks(data, begin)
    if not rows:
        raise RowError("it has no rows")
    return rows, FORMATS[name].fields(data[offsets[0] : offsets[1]]), offsets


def _line_blocks(data: Array, begin: int) -> tuple[int, Array]:
    """Return the line count, and the offset of every 256th line, followed by the end."""
    rows, offsets = 0, [np.array([begin])]
    for at in range(begin, len(data), _CHUNK):
        ends = np.flatnonzero(data[at : at + _CHUNK] == lines.NEWLINE) + (at + 1)
        offsets.append(ends[(-rows - 1) % BLOCK :: BLOCK])
        rows += len(ends)
    blocks = np.concatenate(offsets)
    last = begin < len(data) and data[-1] != lines.NEWLINE
    if last or rows % BLOCK:
        blocks = np.append(blocks, len(data))
    return rows + int(last), blocks.astype(np.uint64)
