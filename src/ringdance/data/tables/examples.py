"""Tables as TFRecords: a ``tf.train.Example`` for each row, parsed for many rows at once, by NumPy alone.

The features are ``label`` (a float or an integer), ``ids`` (integers) and ``values`` (floats), as in the
public DeepFM scripts; or with their other names ``feat_ids`` and ``feat_vals``. All rows are decoded in step:
each array below has an element for each row, such as the place that is read next.
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
_HEAD, _TAIL = 12, 4  # bytes of a record around its data
_EXPECTED = "expected a tf.train.Example with label (one number), ids (integers) and values (floats)"
_length = tfrecord.LENGTH.unpack_from


def bounds(data: Array) -> Array:
    """Return where each record begins, and the end of the last."""
    found, at, size = [0], 0, len(data)
    view = data.tobytes() if size < 1 << 24 else memoryview(data)  # bytes are faster
    while at + _HEAD <= size:
        at += _length(view, at)[0] + _HEAD + _TAIL
        found.append(at)
    if at != size:
        raise RowError(f"the records do not end at byte {size}: damaged, or no TFRecord file")
    return np.array(found)


def scan(data: Array) -> tuple[int, Array]:
    """Return the number of records, where each 256th begins, and the end."""
    if not tfrecord.is_head(bytes(data[:_HEAD])):
        raise RowError("it does not begin with a record: no TFRecord file")
    starts = bounds(data)
    return len(starts) - 1, np.append(starts[:-1:BLOCK], starts[-1]).astype(np.uint64)


def pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield records, at least so many bytes at once; without checksums.

    Raises:
        ArgumentError: one is not complete.
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
    """Return the number of fields of the first record."""
    size = _length(data, 0)[0]
    data = np.append(data[: size + _HEAD], np.zeros(PADDING, np.uint8))
    _, ids, _ = _features(data, np.array([_HEAD]), np.array([_HEAD + size]))
    return int((data[ids[1][0] : ids[2][0]] < 0x80).sum())


def parse(data: Array, starts: Array, fields: int, table_size: int) -> Rows:
    """Parse records; all have as many fields."""
    label, ids, values = _features(data, starts[:-1] + _HEAD, starts[1:] - _TAIL)
    number = data[label[1]] if (label[0] == INT64_LIST).all() else _floats(data, label, 1)[:, 0]
    return Rows(number.astype(np.float32), _integers(data, ids, fields), _floats(data, values, fields))


Feature = tuple[Array, Array, Array]


def _features(data: Array, at: Array, end: Array) -> tuple[Feature, Feature, Feature]:
    """Return of label, ids and values: kind, and where the packed numbers begin and end."""
    count = len(at)
    found = np.zeros((3, 3, count), np.int64)  # feature; kind, begin, end; row
    at, stop = _message(data, at, 1)  # Features
    if (stop != end).any():
        raise RowError(_EXPECTED)
    rows = np.flatnonzero(at < stop)
    while len(rows):
        here, after = _message(data, at[rows], 1)  # an entry of the map
        key, here = _message(data, here, 1)
        feature, _ = _message(data, here, 2)
        kind = data[np.minimum(feature, len(data) - PADDING)] >> 3
        packed, _ = _message(data, feature, None)
        begin, numbers_end = _message(data, packed, None)
        for name, place in _NAMES.items():
            is_it = here - key == len(name)
            if is_it.any():
                text = np.lib.stride_tricks.sliding_window_view(data, len(name))[key * is_it]
                which = np.flatnonzero(is_it & (text == np.frombuffer(name, np.uint8)).all(axis=1))
                found[place][:, rows[which]] = kind[which], begin[which], numbers_end[which]
        at[rows] = after
        rows = rows[at[rows] < stop[rows]]
    if not found[:, 0].all() or (found[:, 2] > end).any() or (at != end).any():
        raise RowError(_EXPECTED)
    return tuple(tuple(one) for one in found)  # type: ignore[return-value]


def _message(data: Array, at: Array, number: int | None) -> tuple[Array, Array]:
    """Return where messages begin and end whose tags are at `at`; of the field `number`, if it is given."""
    at = np.minimum(at, len(data) - PADDING)
    if number is not None and (data[at] != (number << 3 | 2)).any():
        raise RowError(_EXPECTED)
    size, at = _varint(data, at + 1)
    size[(size < 0) | (size > len(data))] = len(data)  # damaged: behind the record, whatever it is
    return at, np.minimum(at + size, len(data))


def _varint(data: Array, at: Array) -> tuple[Array, Array]:
    """Return the integers that begin at `at`, and the places behind them."""
    at = np.minimum(at, len(data) - PADDING)
    value = data[at].astype(np.int64)
    at, shift = at + 1, 7
    while (more := value >> (shift - 7) >= 0x80).any() and shift < 63:
        value[more] += (data[at[more]].astype(np.int64) - 1) << shift  # -1: the mark of the byte before
        at[more] += 1
        shift += 7
    return value, at


def _floats(data: Array, feature: Feature, count: int) -> Array:
    """Return the floats of each row, shape (n, count), float32."""
    kind, begin, end = feature
    if (kind != FLOAT_LIST).any() or (end - begin != 4 * count).any():
        raise RowError(f"{_EXPECTED}; as many values as ids, {count} here")
    return np.lib.stride_tricks.sliding_window_view(data, 4 * count)[begin].view("<f4")


def _integers(data: Array, feature: Feature, count: int) -> Array:
    """Return the integers of each row, shape (n, count), int64."""
    kind, at, end = feature
    found = np.empty((count, len(at)), np.int64)
    for number in range(count):
        found[number], at = _varint(data, at)
    if (kind != INT64_LIST).any() or (at != end).any():
        raise RowError(f"expected {count} ids, as in the first record")
    return np.ascontiguousarray(found.T)


def encode(rows: Rows) -> bytes:
    """Return rows as records, like those of ``tf.io.TFRecordWriter``."""
    ids, ends = _varints(rows.ids)
    values, labels = np.ascontiguousarray(rows.values, "<f4"), rows.labels.tolist()
    size = values.shape[1] * 4
    found, start = [], 0
    for number, end in enumerate(ends.tolist()):
        data = b"".join((
            tfrecord.entry("ids", INT64_LIST, end - start), ids[start:end].tobytes(),
            tfrecord.entry("label", FLOAT_LIST, 4), struct.pack("<f", labels[number]),
            tfrecord.entry("values", FLOAT_LIST, size), values[number].tobytes(),
        ))  # fmt: skip
        found.append(tfrecord.framed(tfrecord.delimited(1, data)))
        start = end
    return b"".join(found)


def _varints(ids: Array) -> tuple[Array, Array]:
    """Encode integers of shape (n, fields); return the bytes, and where those of each row end."""
    flat = ids.reshape(-1)
    size = np.ones(len(flat), np.int64)
    for shift in range(7, 63, 7):
        size += flat >= 1 << shift
    ends = np.cumsum(size)
    found = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    for number in range(int(size.max(initial=0))):
        left = np.flatnonzero(size > number)
        more = (size[left] > number + 1).astype(np.int64) << 7
        found[ends[left] - size[left] + number] = flat[left] >> 7 * number & 0x7F | more
    return found, ends[ids.shape[1] - 1 :: ids.shape[1]]
