"""The ring: the last records of a rank, in memory that other processes of its host can read.

Standard library only: processes that read it start without other packages. Layout, in bytes::

    0       header: 64 words (int64), see ``Word``; the host's name at 1024
    4096    labels: for each its length (uint32) and its UTF-8 bytes; or -length, and numbers of labels
    ...     records, 40 bytes each: time, label, kind, process set, five values, sequence number

Note [Sequence numbers]
    Record n is in slot n modulo the capacity and ends with n. There are no locks: a reader takes a slot for
    record n once it ends with n, and reads the number again after the rest, in case the slot was overwritten.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "RING_NAME", "Kind", "Label", "Record", "Ring", "RingReader", "Who", "Word", "pack", "shared_memory",
    "unpack",
]

RING_NAME = "ringdance-ring"
"""Name of the memory, in /proc/PID/fd of its process."""

Label = str | tuple[str, ...]
_RECORD = struct.Struct("<qIHH5II")
_LENGTH = struct.Struct("<i")
_HEADER, _HOST = 4096, 1024
_LABEL_BYTES = 1 << 20
_CAPACITY = 1 << 15
_MASK = _CAPACITY - 1
_SIZE = _HEADER + _LABEL_BYTES + _CAPACITY * _RECORD.size
_START = _HEADER + _LABEL_BYTES
_VERSION = 0x52440001
_U32 = 0xFFFFFFFF


class Word(enum.IntEnum):
    """Numbers of the header's words. Times are nanoseconds of ``time.monotonic_ns``."""

    VERSION = 0
    PID = 1
    RANK = 2
    SIZE = 3
    EPOCH_OFFSET = 4  # time since the epoch minus monotonic time
    CLOSED = 5  # the rank has left the job
    DETAIL = 6  # set by a reader: record submissions and chunks too
    LABELS = 7  # bytes of labels written
    WRITTEN = 8  # records so far, about
    BATCHES = 9
    TENSORS = 10
    BYTES = 11
    WAITED = 12  # time that threads have waited for results
    STEPS = 13
    LAST_STEP = 14  # when the last step ended
    FIRST_STEP = 15  # when the first one ended, which often compiles
    FIRST_WAITED = 16  # WAITED then
    LAST_WAITED = 17  # WAITED when the last step ended


class Kind(enum.IntEnum):
    """What a record is about, and its values."""

    SUBMIT = 1  # bytes (low, high), collective, wanted by a thread that waits
    BATCH = 2  # ends now: microseconds, round, collective, bytes (low, high)
    CHUNK = 3  # began: nanoseconds of waiting, copying out, reducing, copying in; its number in the batch
    WAIT = 4  # ends now: microseconds
    STEP = 5  # ends now: number
    TEXT = 6  # an event: the label says which
    ROUND = 7  # of agreement: number


class Record(NamedTuple):
    """One record; see ``Kind`` for the values."""

    time: int
    label: int
    kind: int
    set_id: int
    values: tuple[int, ...]


def shared_memory() -> mmap.mmap | None:
    """Return memory for a ring that other processes of this host can open; None where there is none (macOS).

    It counts for the memory of this process, not for /dev/shm, and is gone with the last process that has it.
    """
    if not hasattr(os, "memfd_create"):
        return None
    memory = os.memfd_create(RING_NAME)
    try:
        os.ftruncate(memory, _SIZE)
        return mmap.mmap(memory, _SIZE)  # keeps a descriptor of its own
    finally:
        os.close(memory)


class Who(NamedTuple):
    """A rank's number, host and process."""

    rank: int
    host: str
    pid: int


def pack(records: Iterable[Record]) -> bytes:
    """Return records as bytes."""
    return b"".join(_RECORD.pack(*record[:4], *record.values, 0) for record in records)


def unpack(data: bytes) -> list[Record]:
    """Return the records that ``pack`` has packed."""
    rows = _RECORD.iter_unpack(data)
    return [Record(when, label, kind, set_id, tuple(rest[:5])) for when, label, kind, set_id, *rest in rows]


class Ring:
    """The writing end.

    Args:
        memory: from ``shared_memory``; None for memory of this process alone.

    Attributes:
        words: the header, see ``Word``.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.memory = memory or mmap.mmap(-1, _SIZE)
        view = memoryview(self.memory)
        self.words = view[:512].cast("q")
        self._view = view
        self._next = itertools.count().__next__  # atomic: threads of this process need no lock
        self._labels: dict[Label, int] = {}
        self._ends = _HEADER
        self.words[Word.EPOCH_OFFSET] = time.time_ns() - time.monotonic_ns()
        self.words[Word.PID] = os.getpid()
        self.label("")  # number 0: also for what has no room any more
        self.words[Word.VERSION] = _VERSION

    def describe(self, rank: int, size: int, host: str) -> None:
        """Write whose ring this is."""
        self.words[Word.RANK], self.words[Word.SIZE] = rank, size
        text = host.encode()[:255]
        self._view[_HOST : _HOST + len(text) + 1] = text + b"\0"

    def add(
        self, kind: int, label: int = 0, set_id: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0,
        e: int = 0, when: int = 0,
    ) -> None:
        """Write one record; values are cut to 32 bits."""
        number = self._next()
        _RECORD.pack_into(
            self._view, _START + (number & _MASK) * 40,
            when or time.monotonic_ns(), label, kind, set_id & 0xFFFF,
            a & _U32, b & _U32, c & _U32, d & _U32, e & _U32, number & _U32,
        )  # fmt: skip
        self.words[Word.WRITTEN] = number + 1

    def label(self, names: Label) -> int:
        """Return the number of a name or of a list of names; 0 if there is no room for a new one."""
        known = self._labels.get(names)
        if known is not None:
            return known
        if isinstance(names, str):
            data = names.encode()[:4096]
            length = len(data)
        else:
            numbers = [self.label(name) for name in names]
            data = struct.pack(f"<{len(numbers)}I", *numbers)
            length = -len(data)
        if self._ends + 4 + len(data) > _START:
            return 0
        self._view[self._ends : self._ends + 4 + len(data)] = _LENGTH.pack(length) + data
        self._ends += 4 + len(data)
        number = self._labels[names] = len(self._labels)
        self.words[Word.LABELS] = self._ends - _HEADER
        return number


class RingReader:
    """The reading end, in this or another process.

    Args:
        memory: the ring's.

    Attributes:
        words: the header, see ``Word``.
        labels: the names, or tuples of names, by number.
        lost: how many records were overwritten before they were read.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._view = memoryview(memory)
        self.words = self._view[:512].cast("q")
        if self.words[Word.VERSION] != _VERSION:
            raise ValueError("not a ring of this version")
        self.labels: list[Label] = []
        self.lost = 0
        self._read_labels = _HEADER
        self._position = 0

    @property
    def who(self) -> Who:
        """Whose ring it is."""
        host = bytes(self._view[_HOST : _HOST + 256]).partition(b"\0")[0].decode(errors="replace")
        return Who(self.words[Word.RANK], host, self.words[Word.PID])

    def name(self, number: int) -> Label:
        """Return a label."""
        if number >= len(self.labels):
            self._load_labels()
        return self.labels[number] if number < len(self.labels) else ""

    def _load_labels(self) -> None:
        end = _HEADER + self.words[Word.LABELS]
        while self._read_labels < end:
            (length,) = _LENGTH.unpack_from(self._view, self._read_labels)
            start = self._read_labels + 4
            data = bytes(self._view[start : start + abs(length)])
            if length < 0:
                numbers = struct.unpack(f"<{len(data) // 4}I", data)
                self.labels.append(tuple(str(self.labels[number]) for number in numbers))
            else:
                self.labels.append(data.decode(errors="replace"))
            self._read_labels = start + len(data)

    def skip(self) -> None:
        """Leave out what was written until now."""
        self._position = self.words[Word.WRITTEN]

    def last(self, count: int) -> Iterator[Record]:
        """Yield the last records that are complete, oldest first; ``read`` goes on after them."""
        self._position = max(0, self.words[Word.WRITTEN] - min(count, _CAPACITY))
        return self.read()

    def read(self) -> Iterator[Record]:
        """Yield the records since the last call, oldest first. See Note [Sequence numbers]."""
        behind = self.words[Word.WRITTEN] - _CAPACITY
        if self._position < behind:
            self.lost += behind - self._position
            self._position = behind
        while self._position < self.words[Word.WRITTEN]:
            at = _START + (self._position & _MASK) * 40
            when, label, kind, set_id, *values, number = _RECORD.unpack_from(self._view, at)
            again = _RECORD.unpack_from(self._view, at)[-1]
            expected = self._position & _U32
            if number != expected or again != expected:
                if (number - expected) & _U32 < 1 << 31:  # overwritten
                    self.lost += 1
                elif self.words[Word.WRITTEN] - self._position < 64:
                    return  # another thread is still writing it
            else:
                yield Record(when, label, kind, set_id, tuple(values))
            self._position += 1
