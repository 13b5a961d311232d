"""Encode protocol buffers: what TFRecords and Perfetto's traces need of it. Standard library only."""

from __future__ import annotations

from functools import lru_cache

_BYTES = 2  # the wire type of bytes, texts, messages and packed numbers


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
