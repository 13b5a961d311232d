"""Tables as TFRecords, with one ``tf.train.Example`` per row. NumPy parses many rows at a time.

The features are ``label`` (a float or an integer), ``ids`` (integers) and ``values`` (floats), as in the
public DeepFM scripts. The last two may also be called ``feat_ids`` and ``feat_vals``. All rows are parsed in
lockstep with arrays that have one element per row, such as the offset at which to read next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ringdance.data import tfrecord
from ringdance.data.tables.rows import BLOCK, PADDING, Array, RowError, Rows
from ringdance.data.tfrecord import FLOAT_LIST, INT64_LIST

_NAMES = {b"label": 0, b"ids": 1, b"feat_ids": 1, b"values": 2, b"feat_vals": 2}
_HEAD, _TAIL = 12, 4  # number of bytes before and after a record's data
_EXPECTED = "expected a tf.train.Example with label (one number), ids (integers) and values (floats)"
_length = tfrecord.LENGTH.unpack_from


def bounds(data: Array) -> Array:
    """Return the offset of each record, followed by the end of the last one."""
    offsets, at, size = [0], 0, len(data)
    view = data.tobytes() if size < 1 << 24 else memoryview(data)  # bytes are faster, but need a copy
    while at + _HEAD <= size:
        at += _length(view, at)[0] + _HEAD + _TAIL
        offsets.append(at)
    if at != size:
        raise RowError(f"its last record does not end at byte {size}: it is damaged, or not a TFRecord file")
    return np.array(offsets)


def scan(data: Array) -> tuple[int, Array]:
    """Return the record count, and the offset of every 256th record, followed by the end."""
    if not tfrecord.is_head(bytes(data[:_HEAD])):
        raise RowError("it is not a TFRecord file, because it does not begin with a record")
    starts = bounds(data)
    return len(starts) - 1, np.append(starts[:-1:BLOCK], starts[-1]).astype(np.uint64)


def pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield whole records, at least ``size`` bytes at a time. Does not verify the checksums of the data.

    Raises:
        ArgumentError: A record is incomplete, or its length is damaged.
    """
    parts, total = [], 0
    for _, *record in tfrecord.records(stream, check=False):
        parts += record
        total += _HEAD + len(record[1]) + _TAIL
        if total >= size:
            yield b"".join(parts)
            parts, total = [], 0
    if parts:
        yield b"".join(parts)


def fields(data: Array) -> int:
    """Return the number of fields in the first record."""
    size = _length(data, 0)[0]
    data = np.append(data[: size + _HEAD], np.zeros(PADDING, np.uint8))
    _, ids, _ = _features(data, np.array([_HEAD]), np.array([_HEAD + size]))
    return int((data[ids[1][0] : ids[2][0]] < 0x80).sum())


def parse(data: Array, starts: Array, fields: int, table_size: int) -> Rows:
    """Parse records, each of which must have the given number of fields."""
    label, ids, values = _features(data, starts[:-1] + _HEAD, starts[1:] - _TAIL)
    number = data[label[1]] if (label[0] == INT64_LIST).all() else _floats(data, label, 1)[:, 0]
    return Rows(number.astype(np.float32), _integers(data, ids, fields), _floats(data, values, fields))


Feature = tuple[Array, Array, Array]


def _features(data: Array, at: Array, end: Array) -> tuple[Feature, Feature, Feature]:
    """Locate label, ids and values. Returns each feature's kind, and the start and end of its numbers."""
    count = len(at)
    located = np.zeros((3, 3, count), np.int64)  # axes: feature; kind, begin or end; row
    at, stop = _message(data, at, 1)  # Features
    if (stop != end).any():
        raise RowError(_EXPECTED)
    rows = np.flatnonzero(at < stop)
    while len(rows):
        here, after = _message(data, at[rows], 1)  # entry of the map from names to features
        key, here = _message(data, here, 1)
        feature, _ = _message(data, here, 2)
        kind = data[np.minimum(feature, len(data) - PADDING)] >> 3
        packed, _ = _message(data, feature, None)
        begin, numbers_end = _message(data, packed, None)
        for name, place in _NAMES.items():
            same_length = here - key == len(name)
            if same_length.any():
                text = np.lib.stride_tricks.sliding_window_view(data, len(name))[key * same_length]
                which = np.flatnonzero(same_length & (text == np.frombuffer(name, np.uint8)).all(axis=1))
                located[place][:, rows[which]] = kind[which], begin[which], numbers_end[which]
        at[rows] = after
        rows = rows[at[rows] < stop[rows]]
    if not located[:, 0].all() or (located[:, 2] > end).any() or (at != end).any():
        raise RowError(_EXPECTED)
    return tuple(tuple(feature) for feature in located)  # type: ignore[return-value]


def _message(data: Array, at: Array, number: int | None) -> tuple[Array, Array]:
    """Return the start and end of the messages whose tags are at ``at``. Checks a given field number."""
    at = np.minimum(at, len(data) - PADDING)
    if number is not None and (data[at] != (number << 3 | 2)).any():
        raise RowError(_EXPECTED)
    size, at = _varint(data, at + 1)
    size[(size < 0) | (size > len(data))] = len(data)  # damaged; the check of the end will fail
    return at, np.minimum(at + size, len(data))


def _varint(data: Array, at: Array) -> tuple[Array, Array]:
    """Decode the integers at the offsets ``at``. Returns them, and the offsets after them."""
    at = np.minimum(at, len(data) - PADDING)
    value = data[at].astype(np.int64)
    at, shift = at + 1, 7
    while (continued := value >> (shift - 7) >= 0x80).any() and shift < 63:
        value[continued] += (data[at[continued]].astype(np.int64) - 1) << shift  # -1: continuation bit
        at[continued] += 1
        shift += 7
    return value, at


def _floats(data: Array, feature: Feature, count: int) -> Array:
    """Return a feature's floats as a float32 array of shape (n, count)."""
    kind, begin, end = feature
    if (kind != FLOAT_LIST).any() or (end - begin != 4 * count).any():
        raise RowError(f"{_EXPECTED}, where ids and values have {count} elements each")
    return np.lib.stride_tricks.sliding_window_view(data, 4 * count)[begin].view("<f4")


def _integers(data: Array, feature: Feature, count: int) -> Array:
    """Decode a feature's integers to an int64 array of shape (n, count)."""
    kind, at, end = feature
    integers = np.empty((count, len(at)), np.int64)
    for number in range(count):
        integers[number], at = _varint(data, at)
    if (kind != INT64_LIST).any() or (at != end).any():
        raise RowError(f"expected {count} ids, as in the first record")
    return np.ascontiguousarray(integers.T)


def encode(rows: Rows) -> bytes:
    """Encode rows as TFRecords."""
    ids, ends = _varints(rows.ids)
    values, labels = np.ascontiguousarray(rows.values, "<f4"), rows.labels.tolist()
    size = values.shape[1] * 4
    records, start = [], 0
    for number, end in enumerate(ends.tolist()):
        data = b"".join((
            tfrecord.entry("ids", INT64_LIST, end - start), ids[start:end].tobytes(),
            tfrecord.entry("label", FLOAT_LIST, 4), struct.pack("<f", labels[number]),
            tfrecord.entry("values", FLOAT_LIST, size), values[number].tobytes(),
        ))  # fmt: skip
        records.append(tfrecord.framed(tfrecord.delimited(1, data)))
        start = end
    return b"".join(records)


def _varints(ids: Array) -> tuple[Array, Array]:
    """Encode integers of shape (n, fields). Returns the bytes, and each row's end offset in them."""
    flat = ids.reshape(-1)
    size = np.ones(len(flat), np.int64)
    for shift in range(7, 63, 7):
        size += flat >= 1 << shift
    ends = np.cumsum(size)
    encoded = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    for number in range(int(size.max(initial=0))):
        left = np.flatnonzero(size > number)
        continuation = (size[left] > number + 1).astype(np.int64) << 7
        encoded[ends[left] - size[left] + number] = flat[left] >> 7 * number & 0x7F | continuation
    return encoded, ends[ids.shape[1] - 1 :: ids.shape[1]]
