"""Protocol buffers: what TFRecords need of them. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

# Wire types; bytes are also texts, messages and packed numbers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """Return an integer, negative ones as 64 bits."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


@lru_cache(maxsize=4096)
def delimiter(field: int, size: int) -> bytes:
    """Return what is before the bytes of a field with so many of them."""
    return varint(field << 3 | _BYTES) + varint(size)


def delimited(field: int, data: bytes) -> bytes:
    """Return a field with bytes."""
    return delimiter(field, len(data)) + data


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over a message's fields: number, and where its value begins and ends.

    Raises:
        IndexError: the message ends within a field.
        ValueError: a field is of no known kind.
    """
    while at < end:
        tag, at = read_varint(data, at)
        kind, start = tag & 7, at
        if kind == _VARINT:
            _, at = read_varint(data, at)
        elif kind == _BYTES:
            size, start = read_varint(data, at)
            at = start + size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at > end:
            raise IndexError(at)
        yield tag >> 3, start, at


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer that begins there, from 0 to 2**64 - 1, and the place behind it."""
    value, shift = data[at], 7
    at += 1
    while value >> shift - 7 > 127:
        value += (data[at] - 1) << shift  # -1: the mark of the byte before
        at, shift = at + 1, shift + 7
    return value, at
