"""Find and parse the rows of text files, which have one row per line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from ringdance.data.files import needed
from ringdance.data.tables.rows import Array, RowError, Rows

NEWLINE, SPACE, COLON = b"\n :"


def bounds(data: Array) -> Array:
    """Return the offset of each line, followed by the end of the last one, which may lack a newline."""
    ends = np.flatnonzero(data == NEWLINE) + 1
    if len(data) and (not len(ends) or ends[-1] != len(data)):
        ends = np.append(ends, len(data))
    return np.concatenate([[0], ends])


def pieces(stream: BinaryIO, size: int, first: int | None = None) -> Iterator[bytes]:
    """Yield chunks of whole lines, about ``size`` bytes each, or ``first`` bytes for the first chunk.

    A line belongs to the chunk in which it begins. All lines end with ``\\n``, even the last.
    """
    left = size if first is None else first
    while True:
        data = stream.read(max(left, 0))
        if left > 0 and not data:
            return
        if data and data[-1] != NEWLINE:
            data += stream.readline()
        left += size - len(data)
        if data and data[-1] != NEWLINE:
            data += b"\n"
        yield data.replace(b"\r\n", b"\n")


def columns(data: Array, delimiter: str, types: Sequence[tuple[str, str]], null: bool = False) -> list[Any]:
    """Parse lines of text into one Arrow array per column.

    Args:
        data: The lines, as bytes.
        delimiter: Delimiter between columns.
        types: Name and Arrow type, such as "float32", of each column.
        null: If True, an empty numeric column is a missing value. If False, it is an error.

    Raises:
        RowError: A line has the wrong number of columns, or a numeric column does not contain a number.
    """
    arrow, csv = needed("pyarrow"), needed("pyarrow.csv")
    names = [str(number) for number in range(len(types))]
    try:
        table = csv.read_csv(
            arrow.BufferReader(arrow.py_buffer(data)),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            csv.ParseOptions(
                delimiter=delimiter, quote_char=False, escape_char=False, ignore_empty_lines=False
            ),
            csv.ConvertOptions(
                column_types=dict(zip(names, (getattr(arrow, kind)() for _, kind in types), strict=True)),
                null_values=[""] if null else [], strings_can_be_null=False, check_utf8=False,
            ),
        )  # fmt: skip
    except arrow.ArrowInvalid as error:
        text = re.sub(_NOISE, "", str(error))
        text = re.sub(r"column #(\d+)", lambda match: f"column {types[int(match[1])][0]}", text)
        raise RowError(text[:200]) from None
    return [column.chunk(0) for column in table.columns]  # only one chunk, as all data is in one block


_NOISE = r"^CSV parse error: |CSV conversion error to \w+: |Row #\d+: |^In CSV |\n.*"


def libsvm_fields(data: Array) -> int:
    """Return the number of fields in the first line of LibSVM data."""
    return int(np.count_nonzero(data[: bounds(data)[1]] == COLON))


def parse_libsvm(data: Array, starts: Array, fields: int, table_size: int) -> Rows:
    """Parse lines of the form ``label id:value id:value ...``, with ids from 1 and ``fields`` pairs."""
    data = data[: starts[-1]]
    loose = starts[1:][data[starts[1:] - 2] == SPACE] - 2  # positions of trailing spaces
    if len(loose):
        data = np.delete(data, loose)
    colons = data == COLON
    if (pair_count := np.count_nonzero(colons)) != fields * (len(starts) - 1):
        raise RowError(f"expected a label and {fields} id:value pairs, but there are {pair_count} pairs")
    data -= colons * np.uint8(COLON - SPACE)  # replace colons with spaces
    pairs = [(f"{part} {n}", kind) for n in range(1, fields + 1) for part, kind in _PAIR]
    parsed = [column.to_numpy() for column in columns(data, " ", [("label", "float32"), *pairs])]
    ids = np.stack(parsed[1::2], axis=1)
    ids -= 1
    return Rows(parsed[0].copy(), ids, np.stack(parsed[2::2], axis=1))


_PAIR = ("id", "int64"), ("value", "float32")
