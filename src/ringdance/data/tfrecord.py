"""Read and write TFRecord files and the ``tf.train.Example`` messages in them, without TensorFlow.

A record consists of its length (8 bytes, little-endian), the masked CRC-32C of these 8 bytes, the data, and
the masked CRC-32C of the data. The data is an Example, a protocol buffer that maps names to lists of bytes or
numbers: https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import BinaryIO

from ringdance.data.files import ShardWriter, crc32c
from ringdance.data.sample import Sample
from ringdance.errors import ArgumentError

LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
# Wire types of protocol buffers. _BYTES includes strings, messages and packed numbers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3  # field numbers in tf.train.Feature
FIRST_LABEL = 1
"""Label of the first class in ``image/class/label``. TensorFlow's ImageNet scripts reserve 0."""

Value = bytes | int


def masked(crc: int) -> int:
    """Mask a CRC-32C, as TFRecord files require."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def features(sample: Sample) -> dict[str, Value]:
    """Return a sample's features except the image, named as in TensorFlow's ImageNet scripts."""
    return {
        "image/channels": 3,
        "image/class/label": sample.label + FIRST_LABEL,
        "image/class/synset": sample.synset.encode(),
        "image/colorspace": b"RGB",
        "image/filename": sample.name.rpartition("/")[2].encode(errors="surrogateescape"),
        "image/format": b"JPEG",
        "image/height": sample.height,
        "image/width": sample.width,
    }


def encode(features: Mapping[str, Value], name: str, data: bytes) -> bytes:
    """Encode an Example whose last feature, ``name``, has the value ``data``. Omits the final ``data``."""
    body = b"".join(_feature(key, value) for key, value in sorted(features.items()))
    body += entry(name, BYTES_LIST, len(data))
    return delimiter(1, len(body) + len(data)) + body


@lru_cache(maxsize=4096)  # most features are the same for many images
def _feature(name: str, value: Value) -> bytes:
    kind, data = (BYTES_LIST, value) if isinstance(value, bytes) else (INT64_LIST, varint(value))
    return entry(name, kind, len(data)) + data


@lru_cache(maxsize=4096)
def entry(name: str, kind: int, size: int) -> bytes:
    """Encode an entry in an Example's map of features, without the value at its end.

    Args:
        name: Name of the feature.
        kind: Field number in tf.train.Feature, such as ``BYTES_LIST``.
        size: Size in bytes of the value, which is a single string, or all numbers in packed form.
    """
    feature = delimiter(1, size)
    feature = delimiter(kind, len(feature) + size) + feature
    encoded = delimited(1, name.encode()) + delimiter(2, len(feature) + size) + feature
    return delimiter(1, len(encoded) + size) + encoded


def write(shard: ShardWriter, sample: Sample) -> int:
    """Append a sample as a record. Returns the image's offset in the file."""
    head = encode(features(sample), "image/encoded", sample.image)
    shard.write(_head(len(head) + len(sample.image)) + head)
    offset = shard.size
    shard.write(sample.image)
    shard.write(_CRC.pack(masked(crc32c(sample.image, crc32c(head)))))
    return offset


def framed(data: bytes) -> bytes:
    """Return a record with ``data``, its length and the checksums."""
    return _head(len(data)) + data + _CRC.pack(masked(crc32c(data)))


def _head(size: int) -> bytes:
    """Return the bytes before a record's data: its length and the length's checksum."""
    length = LENGTH.pack(size)
    return length + _CRC.pack(masked(crc32c(length)))


def records(file: BinaryIO, check: bool = True) -> Iterator[tuple[int, bytes, bytes, bytes]]:
    """Yield each record's offset, the 12 bytes before its data, the data, and the data's checksum.

    Args:
        file: Binary file, positioned at its start.
        check: If True, verify the data's checksum. The length's checksum is always verified.

    Raises:
        ArgumentError: A checksum is wrong, or the file ends within a record.
    """
    offset = number = 0
    while head := file.read(12):
        number += 1
        if not is_head(head):
            raise ArgumentError(f"{file.name} is damaged or not a TFRecord file: no record at byte {offset}.")
        length = LENGTH.unpack(head[:8])[0]
        data = file.read(length)
        crc = file.read(4)
        if len(crc) < 4:
            where = f"record {number}, at byte {offset}"
            raise ArgumentError(f"{file.name} is incomplete: it ends within {where}. Write or copy it again.")
        if check and masked(crc32c(data)) != _CRC.unpack(crc)[0]:
            raise ArgumentError(f"{file.name} is damaged: the record at byte {offset} has a wrong checksum.")
        yield offset, head, data, crc
        offset += 16 + length


def is_head(head: bytes) -> bool:
    """Return True if ``head`` consists of a record's length and the length's checksum, 12 bytes in total."""
    return len(head) == 12 and masked(crc32c(head[:8])) == _CRC.unpack(head[8:])[0]


def parse(data: bytes) -> dict[str, tuple[Value | float, int]]:
    """Return the first value of each feature in an Example, with the value's offset in ``data``.

    Raises:
        ArgumentError: The data is not an Example.
    """
    features: dict[str, tuple[Value | float, int]] = {}
    try:
        for _, start, end in fields(data, 0, len(data)):  # Example
            for _, at, stop in fields(data, start, end):  # Features, a map with these entries
                entry = {number: (a, b) for number, a, b in fields(data, at, stop)}
                key = data[slice(*entry[1])].decode()
                for kind, a, b in fields(data, *entry.get(2, (0, 0))):
                    if value := _first(data, kind, a, b):
                        features[key] = value
    except (IndexError, KeyError, ValueError):
        raise ArgumentError("a record does not contain a tf.train.Example") from None
    return features


def _first(data: bytes, kind: int, start: int, end: int) -> tuple[Value | float, int] | None:
    """Return the first value of a BytesList, FloatList or Int64List, with its offset."""
    for _, at, stop in fields(data, start, end):
        if kind == BYTES_LIST:
            return data[at:stop], at
        if kind == FLOAT_LIST and stop - at >= 4:
            return struct.unpack_from("<f", data, at)[0], at
        if kind == INT64_LIST:
            value = read_varint(data, at)[0]
            return value - (value >> 63 << 64), at
    return None


def varint(value: int) -> bytes:
    """Encode an integer as a varint. A negative integer is encoded as 64-bit two's complement."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@lru_cache(maxsize=4096)
def delimiter(field: int, size: int) -> bytes:
    """Encode the tag and the size of a length-delimited field."""
    return varint(field << 3 | _BYTES) + varint(size)


def delimited(field: int, data: bytes) -> bytes:
    """Encode a length-delimited field, which contains bytes, a string or a message."""
    return delimiter(field, len(data)) + data


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field in a message, and the start and end of its value.

    Raises:
        IndexError: The message ends within a field.
        ValueError: A field has an unknown wire type.
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
    """Decode the varint at ``at``. Returns the integer, from 0 to 2**64 - 1, and the offset after it."""
    value, shift = data[at], 7
    at += 1
    while value >> shift - 7 > 127:
        value += (data[at] - 1) << shift  # -1 removes the previous byte's continuation bit
        at, shift = at + 1, shift + 7
    return value, at
