"""The ring: a rank's latest records, in memory that other processes on its host can read.

Uses only the standard library, so that processes that read a ring need no other packages. Layout, in bytes::

    0       header: 64 words (int64), see ``Word``; the host's name at 1024, ``pending_name`` at 2048
    4096    labels: length (int32) and UTF-8 bytes of a name; or -length and the label numbers of a list
    ...     records, 40 bytes each: time, label, kind, process set, five values, sequence number

Note [Sequence numbers]
    Record n is in slot n modulo the capacity, and its last field is n. Instead of locking, a reader accepts a
    slot as record n once that field is n, and checks the field again after reading the rest, in case the slot
    was overwritten.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

RING_NAME = "ringdance-ring"
"""Name of a ring's memory, as shown in /proc/PID/fd."""

Label = str | tuple[str, ...]
RECORD = struct.Struct("<qIHH5II")
"""Fields of a record: time, label, kind, process set, five values, sequence number."""

_LENGTH = struct.Struct("<i")
_HEADER, _HOST, _PENDING = 4096, 1024, 2048
_LABEL_BYTES = 1 << 20
_CAPACITY = 1 << 15
MASK = _CAPACITY - 1
_SIZE = _HEADER + _LABEL_BYTES + _CAPACITY * RECORD.size
_START = _HEADER + _LABEL_BYTES
_VERSION = 0x52440002
_U32 = 0xFFFFFFFF
_WRITERS = 64  # maximum number of threads that write a record at the same time


class Word(enum.IntEnum):
    """Positions of the header's words. Times are in nanoseconds of ``time.monotonic_ns``."""

    VERSION = 0
    PID = 1
    RANK = 2
    SIZE = 3
    EPOCH_OFFSET = 4  # time since the epoch minus monotonic time
    CLOSED = 5  # 1 once the rank leaves the job
    DETAIL = 6  # a reader sets this to have submissions and chunks recorded as well
    LABELS = 7  # number of label bytes written
    WRITTEN = 8  # approximate number of records written so far
    BATCHES = 9  # this word and the next three are updated at each step and a few times per second
    TENSORS = 10
    BYTES = 11
    WAITED = 12  # time that threads waited for results
    STEPS = 13
    LAST_STEP = 14  # time at which the last step ended
    FIRST_STEP = 15  # time at which the first step ended, which often includes compilation
    FIRST_WAITED = 16  # WAITED when the first step ended
    LAST_WAITED = 17  # WAITED when the last step ended
    PENDING = 18  # label of the operation that had been waited for longest at the last check, 0 if none
    PENDING_SINCE = 19


_WRITTEN = int(Word.WRITTEN)  # a plain integer, which is faster than an Enum member


class Kind(enum.IntEnum):
    """Kinds of records, and their values.

    A record's time is the end of a batch, wait or step, but the start of a chunk.
    """

    SUBMIT = 1  # bytes (low, high), collective
    BATCH = 2  # round, microseconds, collective, bytes (low, high)
    CHUNK = 3  # microseconds of waiting; nanoseconds of copying out, reducing, copying in; count
    WAIT = 4  # a thread's wait for a result: microseconds
    STEP = 5  # number of the step; the value of ``Word.DETAIL``
    TEXT = 6  # an event, described by the label
    ROUND = 7  # round of agreement: number


class Record(NamedTuple):
    """One record. See ``Kind`` for the values."""

    time: int
    label: int
    kind: int
    set_id: int
    values: tuple[int, ...]


def counters(words: Sequence[int]) -> dict[str, Any]:
    """Return the counters in a ring's header, which count from the start of the rank."""
    return {
        "steps": words[Word.STEPS],
        "batches": words[Word.BATCHES],
        "tensors": words[Word.TENSORS],
        "bytes": words[Word.BYTES],
        "exposed_seconds": round(words[Word.WAITED] / 1e9, 6),
    }


def steps_text(words: memoryview) -> str:
    """Return a rank's progress, such as "12 steps" or, if no steps are counted, "30 exchanges"."""
    if steps := words[Word.STEPS]:
        return f"{steps} step{'s' * (steps != 1)}"
    batches = words[Word.BATCHES]
    return f"{batches} exchange{'s' * (batches != 1)}"


def shared_memory() -> mmap.mmap | None:
    """Return ring memory that other processes on this host can open, or None if unsupported (macOS).

    The memory counts toward this process, not /dev/shm, and is freed when no process maps it any longer.
    """
    if not hasattr(os, "memfd_create"):
        return None
    memory = os.memfd_create(RING_NAME)
    try:
        os.ftruncate(memory, _SIZE)
        return mmap.mmap(memory, _SIZE)  # mmap duplicates the descriptor
    finally:
        os.close(memory)


def memories(pid: int, name: str) -> Iterator[str]:
    """Yield the paths of a process's memory files (memfd) with this name, if this process may read them."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{name}"):
                    yield path


class Who(NamedTuple):
    """A rank's number, host and process id."""

    rank: int
    host: str
    pid: int


def records(first: int, data: bytes) -> Iterator[Record]:
    """Yield the records in a result of ``RingReader.take``, skipping incomplete ones."""
    for expected, (when, label, kind, set_id, *values, number) in enumerate(RECORD.iter_unpack(data), first):
        if number == expected & _U32:
            yield Record(when, label, kind, set_id, tuple(values))


class Ring:
    """Writes the records of this rank to a ring.

    Args:
        memory: Memory from ``shared_memory``, or None for memory that only this process can access.

    Attributes:
        words: Header, see ``Word``.
        view: View of the whole memory.
        slots: Memory of the records. Record n is in slot n & MASK.
        numbers: Yields the number of the next record.
        labels: Label numbers by name or list of names.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.memory = memory or mmap.mmap(-1, _SIZE)
        view = memoryview(self.memory)
        self.words = view[:512].cast("q")
        self.view = view
        self.slots = view[_START:]
        self.numbers: Iterator[int] = itertools.count()  # next() is atomic, so threads need no lock
        self.labels: dict[Label, int] = {}
        self._adding = threading.Lock()
        self.words[Word.EPOCH_OFFSET] = time.time_ns() - time.monotonic_ns()
        self.words[Word.PID] = os.getpid()
        self.label("")  # label 0, which also stands for names that no longer fit
        self.words[Word.VERSION] = _VERSION

    def describe(self, rank: int, size: int, host: str) -> None:
        """Write the rank, job size and host to the header."""
        self.words[Word.RANK], self.words[Word.SIZE] = rank, size
        self._write(_HOST, host, 255)

    def pending_name(self, name: str) -> None:
        """Write the full name of the operation that ``Word.PENDING`` identifies only by its label."""
        self._write(_PENDING, name, 2047)

    def _write(self, at: int, text: str, most: int) -> None:
        data = text.encode(errors="backslashreplace")[:most] + b"\0"
        self.view[at : at + len(data)] = data

    def add(
        self, kind: int, label: int = 0, set_id: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0,
        e: int = 0, when: int = 0,
    ) -> None:
        """Write one record. Values are truncated to 32 bits."""
        number = next(self.numbers)
        RECORD.pack_into(
            self.slots, (number & MASK) * 40, when or time.monotonic_ns(), label, kind, set_id & 0xFFFF,
            a & _U32, b & _U32, c & _U32, d & _U32, e & _U32, number & _U32,
        )  # fmt: skip
        self.words[_WRITTEN] = number + 1

    def label(self, names: Label) -> int:
        """Return the label number of a name or a list of names, or 0 if it is new and does not fit.

        Threads: any. Only the first use of a name takes a lock.
        """
        known = self.labels.get(names)
        if known is not None:
            return known
        if isinstance(names, str):
            data = names.encode(errors="backslashreplace")[:4096]
            length = len(data)
        else:
            numbers = [self.label(name) for name in names]
            data = struct.pack(f"<{len(numbers)}I", *numbers)
            length = -len(data)
        with self._adding:
            start = _HEADER + self.words[Word.LABELS]
            end = start + 4 + len(data)
            if names in self.labels or end > _START:  # another thread may have just added this label
                return self.labels.get(names, 0)
            self.view[start:end] = _LENGTH.pack(length) + data
            self.words[Word.LABELS] = end - _HEADER
            self.labels[names] = number = len(self.labels)  # last, because readers can now look it up
        return number


class RingReader:
    """Reads the records in a ring, which may belong to another process.

    Args:
        memory: Memory of the ring.

    Attributes:
        words: Header, see ``Word``.
        labels: Names, or tuples of names, by number.
        lost: Number of records that were overwritten before they were read.
        ended: True once the rank has stopped writing. Records that are incomplete by then stay incomplete.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._view = memoryview(memory)
        self._slots = self._view[_START:]
        self.words = self._view[:512].cast("q")
        if self.words[Word.VERSION] != _VERSION:
            raise ValueError("The memory does not contain a ring in the layout of this Ringdance version.")
        self.labels: list[Label] = []
        self.lost = 0
        self.ended = False
        self._read_labels = _HEADER
        self._position = 0

    @property
    def who(self) -> Who:
        """The rank that the ring belongs to."""
        return Who(self.words[Word.RANK], self._text(_HOST, 256), self.words[Word.PID])

    @property
    def pending_name(self) -> str:
        """The full name of the operation that ``Word.PENDING`` identifies by its label."""
        return self._text(_PENDING, 2048)

    def _text(self, at: int, most: int) -> str:
        return bytes(self._view[at : at + most]).partition(b"\0")[0].decode(errors="replace")

    def name(self, number: int) -> Label:
        """Return the label with this number, or "" if no such label exists."""
        if number >= len(self.labels):
            self.load_labels()
        return self.labels[number] if number < len(self.labels) else ""

    def load_labels(self) -> None:
        """Read the labels added since the last call."""
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
        """Skip all records written so far."""
        self._position = self.words[Word.WRITTEN]

    def last(self, count: int) -> Iterator[Record]:
        """Yield at most ``count`` of the latest complete records, oldest first."""
        self._position = max(0, self.words[_WRITTEN] - min(count, _CAPACITY - _WRITERS))
        return self.read()

    def read(self) -> Iterator[Record]:
        """Yield the records that have been written since the last call, oldest first."""
        return records(*self.take())

    def take(self) -> tuple[int, bytes]:
        """Return the records written since the last call: the number of the first, and all of them as bytes.

        Pass both to ``records``. See Note [Sequence numbers].
        """
        end = self.words[_WRITTEN]
        if self.ended:  # a killed thread may not have counted its last record; ``records`` skips gaps
            end += _WRITERS
        self._leave_out(end)
        first = self._position
        at, to = (first & MASK) * 40, (end & MASK) * 40
        slots = self._slots
        data = bytes(slots[at:to]) if at <= to else bytes(slots[at:]) + bytes(slots[:to])
        self._leave_out(self.words[_WRITTEN])  # skip records that were overwritten during the copy

        data = data[(self._position - first) * 40 :]
        first = self._position
        for number in range(max(first, end - _WRITERS), 0 if self.ended else end):
            if RECORD.unpack_from(data, (number - first) * 40)[-1] != number & _U32:
                end = number  # another thread is still writing this record
                break
        self._position = max(first, end)
        return first, data[: (self._position - first) * 40]

    def _leave_out(self, written: int) -> None:
        before = written - _CAPACITY + _WRITERS
        if self._position < before:
            self.lost += before - self._position
            self._position = before
