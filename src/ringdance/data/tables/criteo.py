"""Parse Criteo's columns (a label, 13 numbers and 26 categories), and compute ids and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringdance.data.tables.lines import NEWLINE, columns
from ringdance.data.tables.rows import Array, RowError, Rows
from ringdance.errors import ArgumentError

NUMERIC, CATEGORICAL = 13, 26
FIELDS = NUMERIC + CATEGORICAL
BOM = b"\xef\xbb\xbf"
COLUMNS = ("label", *(f"I{n}" for n in range(1, NUMERIC + 1)), *(f"C{n}" for n in range(1, CATEGORICAL + 1)))
_TYPES = [
    (name, "float32" if name == "label" else "float64" if name[0] == "I" else "binary") for name in COLUMNS
]

Texts = tuple[Array, Array]
"""A column's strings: their offsets, followed by the end of the last one, shape (n + 1,), and their bytes."""


def parse(data: Array, starts: Array, fields: int, table_size: int) -> Rows:
    """Parse and transform lines with Criteo's columns, separated by commas or tabs."""
    data = data[: starts[-1]]
    delimiter = "\t" if (data[: starts[1]] == ord("\t")).any() else ","
    parsed = columns(data, delimiter, _TYPES, null=True)
    if parsed[0].null_count:
        raise RowError("the label column is empty: expected 0 or 1")
    rows = Rows.empty(len(starts) - 1, FIELDS)
    rows.labels[:] = parsed[0].to_numpy()
    numbers = np.stack([column.to_numpy(zero_copy_only=False) for column in parsed[1 : 1 + NUMERIC]], axis=1)
    transform(numbers, [texts(column) for column in parsed[1 + NUMERIC :]], rows, table_size)
    return rows


def texts(column: Any) -> Texts:
    """Return the strings in a binary Arrow array, without copying them."""
    _, begins, data = column.buffers()
    offsets = np.frombuffer(begins, np.int32)[column.offset : column.offset + len(column) + 1]
    return offsets, np.frombuffer(data or b"", np.uint8)


def transform(numbers: Array, texts: Sequence[Texts], out: Rows, table_size: int) -> None:
    """Compute ids and values from the columns.

    The number x in numeric column i gets the id i and the value log1p(max(x, 0)), or 0 if x is missing.
    A category gets the value 1, and as its id a hash of the column and the string, which is at least 13.

    Args:
        numbers: Shape (n, 13), float64. NaN if missing.
        texts: Strings of the 26 categorical columns.
        out: Receives the ids and values.
        table_size: Upper bound of the ids, exclusive.

    Raises:
        ArgumentError: ``table_size`` leaves no ids for the categories.
    """
    if table_size <= NUMERIC:
        raise ArgumentError(f"table_size={table_size} must be above {NUMERIC}, the count of numeric columns.")
    out.ids[:, :NUMERIC] = np.arange(NUMERIC)
    out.values[:, :NUMERIC] = np.log1p(np.fmax(numbers, 0))  # fmax turns NaN into 0
    out.values[:, NUMERIC:] = 1
    hashes, rows = hash_texts(texts), np.uint64(table_size - NUMERIC)
    hashes -= hashes // rows * rows  # the same as hashes % rows, but much faster
    out.ids[:, NUMERIC:] = hashes.reshape(CATEGORICAL, -1).T
    out.ids[:, NUMERIC:] += NUMERIC


def hash_texts(texts: Sequence[Texts]) -> Array:
    """Hash the strings of several columns, with a different hash function for each column.

    SplitMix64's finalizer is applied to the column index and the string length, then to the string eight
    bytes at a time. The result is the same on any machine.

    Args:
        texts: Each column's strings. All columns have the same length.

    Returns:
        uint64 array of shape (columns * n,), with the columns concatenated.
    """
    data = [data[begins[0] : begins[-1]] for begins, data in texts]
    joined = np.concatenate([*data, np.zeros(8, np.uint8)])
    size = np.concatenate([np.diff(begins) for begins, _ in texts])
    at = np.cumsum(size, dtype=np.int64) - size
    words = np.ndarray(len(joined) - 7, "<u8", joined, strides=(1,))
    salts = mixed(np.arange(1, len(texts) + 1, dtype=np.uint64))
    state = mixed(np.repeat(salts, len(size) // len(texts)) + size.astype(np.uint64))
    state = mixed(state ^ (words[at] & _MASKS[np.minimum(size, 8)]))
    left = np.flatnonzero(size > 8)
    while len(left):
        at, size = at + 8, size - 8
        state[left] = mixed(state[left] ^ (words[at[left]] & _MASKS[np.minimum(size[left], 8)]))
        left = left[size[left] > 8]
    return state


_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)  # mask n keeps n bytes of a word


def mixed(value: Array) -> Array:
    """Apply SplitMix64's finalizer to each number in an array of dtype uint64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def header_size(data: Array) -> int:
    """Return the size in bytes of the line with column names, or 0 if a file starts with a row.

    Raises:
        RowError: The first line contains neither Criteo's column names in order nor a row.
    """
    if bytes(data[: len(BOM)]) == BOM:
        return len(BOM) + header_size(data[len(BOM) :])
    ends = np.flatnonzero(data == NEWLINE)
    line = bytes(data[: ends[0]] if len(ends) else data).decode(errors="replace")
    names = [word.strip(' "\r') for word in line.replace("\t", ",").split(",")]
    if not names[0] or names[0].replace(".", "").isdigit():
        return 0
    if [name.lower() for name in names] != [name.lower() for name in COLUMNS]:
        raise RowError(f"its first line is {line[:80]!r}: expected label,I1,...,I13,C1,...,C26, or a row")
    return int(ends[0]) + 1 if len(ends) else len(data)
