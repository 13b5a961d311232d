"""The flight recorder: this rank's last batches and events, written to a file when the engine fails."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import struct
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, NamedTuple

from ringdance.core.labels import label_of
from ringdance.core.request import Collective, Work
from ringdance.core.ring import MASK, RECORD, Kind, Ring, RingReader, Word, steps_text
from ringdance.core.transport.base import Identity


class StepMark(enum.IntEnum):
    """Events that mark the end of a step. After a higher mark has been seen, lower ones are ignored."""

    NONE = 0
    GRADIENTS = 1  # an exchange of gradients for an optimizer that Ringdance does not wrap
    OPTIMIZER = 2
    SCRIPT = 3


class Profiler(NamedTuple):
    """A framework's own profiler, in which waits are recorded so that they appear in its output.

    Attributes:
        running: Returns True if the profiler is recording. Takes well under 1 µs.
        span: Returns a context manager that records a span with this name.
    """

    running: Callable[[], bool]
    span: Callable[[str], AbstractContextManager[Any]]


_COUNTERS = struct.Struct("<4q").pack_into  # BATCHES, TENSORS, BYTES, WAITED


@dataclass(slots=True)
class BatchRecord:
    """The fields of a batch's record that do not change from one execution to the next."""

    set_id: int
    collective: int
    label: int
    nbytes: int


_RECORDS = 256  # maximum number of records in a flight record
_SMALL = 64  # maximum number of small-batch records to hold back
# Plain integers, which are faster than Enum members.
_SUBMIT, _BATCH, _CHUNK = int(Kind.SUBMIT), int(Kind.BATCH), int(Kind.CHUNK)
_WAIT, _STEP = int(Kind.WAIT), int(Kind.STEP)
_DETAIL, _WRITTEN, _WAITED, _LAST_WAITED, _STEPS, _LAST_STEP = (
    int(Word.DETAIL), int(Word.WRITTEN), int(Word.WAITED), int(Word.LAST_WAITED), int(Word.STEPS),
    int(Word.LAST_STEP),
)  # fmt: skip
_U32 = 0xFFFFFFFF


class Recorder:
    """Records this rank's activities in a ring. All reports are made from these records.

    Args:
        directory: Directory for flight records, or "" for the system's temporary directory.
        ring: Memory for the records, or None for memory that only this process can access.

    Attributes:
        words: Header of the ring, see ``ring.Word``.
        detail: ``words[Word.DETAIL]`` as last read. 1 means that submissions, chunks and waits are recorded,
            2 that rounds are recorded as well.
        waited: Seconds that threads have waited for results.
        window: The step after which ``words[Word.DETAIL]`` is set, the step after which it is cleared, and
            the value to set. None if steps do not change it.
    """

    def __init__(self, directory: str = "", ring: Ring | None = None) -> None:
        self.ring = ring or Ring()
        self.words = self.ring.words
        self.window: tuple[int, int, int] | None = None
        self.detail = self.words[Word.DETAIL]
        self._first = tuple(self.words[Word.BATCHES : Word.WAITED + 1])
        self._small: deque[tuple[BatchRecord, int, int, int]] = deque(maxlen=_SMALL)
        self.uncounted()
        self._directory = directory
        self._step_mark, self._steps = StepMark.NONE, 0

    def batch(self, what: BatchRecord, round_number: int, began: int = 0, tensors: int = 1) -> None:
        """Record a batch that has just ended.

        Args:
            what: The batch.
            round_number: Number of the round in which the members agreed on the batch.
            began: Start time in nanoseconds (``time.monotonic_ns``). 0 to record a duration of 0.
            tensors: Number of tensors.
        """
        if self._small:
            self._write_small()
        now = monotonic_ns()
        self._write(what, round_number, now, (now - began) // 1000 if began else 0)
        self._batches += 1
        self._tensors += tensors
        self._bytes += what.nbytes

    def read_detail(self) -> int:
        """Update ``detail`` from the ring's header and return it."""
        self.detail = detail = self.words[_DETAIL]
        return detail

    def small_batch(self, what: BatchRecord, round_number: int) -> None:
        """Record a batch of one small tensor. The record is held back unless submissions are recorded."""
        if self.detail:
            self.batch(what, round_number)
        else:  # writing the record now would take a tenth of the time of a small all-reduce
            self._small.append((what, round_number, monotonic_ns(), 0))
            self._small_batches += 1
            self._small_bytes += what.nbytes

    def _write_small(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may have taken the last record
            while self._small:
                self._write(*self._small.popleft())

    def _write(self, what: BatchRecord, round_number: int, now: int, duration: int) -> None:
        number = next(self.ring.numbers)
        RECORD.pack_into(  # like Ring.add, but faster, because this runs for each batch
            self.ring.slots, (number & MASK) * 40, now, what.label, _BATCH, what.set_id & 0xFFFF,
            round_number & _U32, duration & _U32, what.collective, what.nbytes & _U32,
            what.nbytes >> 32 & _U32, number & _U32,
        )  # fmt: skip
        self.words[_WRITTEN] = number + 1

    def uncounted(self) -> None:
        """Exclude everything that this engine has exchanged so far from the counters."""
        self._batches, self._tensors, self._bytes, waited = self._first
        self.waited = waited / 1e9
        self._small_batches = self._small_bytes = 0

    def publish(self) -> None:
        """Write the counters, and records that were held back, to the ring."""
        self._write_small()
        small, nbytes = self._small_batches, self._bytes + self._small_bytes
        counters = self._batches + small, self._tensors + small, nbytes, int(self.waited * 1e9)
        _COUNTERS(self.ring.view, 8 * Word.BATCHES, *counters)

    def step(self, mark: StepMark = StepMark.OPTIMIZER) -> None:
        """Record that a step has ended. Steps counted so far by a lower ``mark`` are discarded."""
        words, now = self.words, monotonic_ns()
        if mark != self._step_mark:
            if mark < self._step_mark:
                return
            words[_STEPS] -= self._steps
            self._step_mark, self._steps = mark, 0
        self._steps += 1
        number = words[_STEPS] = words[_STEPS] + 1
        words[_LAST_STEP] = now
        self.publish()
        words[_LAST_WAITED] = words[_WAITED]
        if number == 1:
            words[Word.FIRST_STEP], words[Word.FIRST_WAITED] = now, words[Word.WAITED]
        self.ring.add(_STEP, 0, 0, number, self.detail, when=now)
        if self.window is not None and number in self.window[:2]:
            words[_DETAIL] = self.window[2] if number == self.window[0] else 0
        self.read_detail()

    def submit(self, work: Work) -> None:
        """Record a submission."""
        request = work.request
        nbytes = sum([view.nbytes for view in request.inputs])
        label, kind = self.ring.label(label_of(work.name)), request.description.kind
        self.ring.add(_SUBMIT, label, request.set_id, nbytes, nbytes >> 32, kind)

    def wait(self, work: Work, seconds: float) -> None:
        """Record that a thread has waited for a result."""
        label = self.ring.label(label_of(work.name))
        self.ring.add(_WAIT, label, work.request.set_id, int(seconds * 1e6))

    def alone(self, work: Work) -> None:
        """Record a request without peers as a batch."""
        request = work.request
        nbytes = sum([view.nbytes for view in request.inputs])
        label, began = self.ring.label(label_of(work.name)), int(work.submitted * 1e9)
        if self.detail > 1:
            self.ring.add(Kind.ROUND)
        self.batch(BatchRecord(request.set_id, request.description.kind, label, nbytes), 0, began)

    def marks(self) -> list[int]:
        """Return a list for the times of a batch's phases: [start time], or [] if they are not recorded."""
        return [monotonic_ns()] if self.detail else []

    def chunks(self, set_id: int, marks: list[int], every: int) -> None:
        """Record the phases of a batch's chunks.

        Args:
            set_id: Process set.
            marks: Times in nanoseconds. The first is the start of the batch. Five times per recorded chunk
                follow: when its inputs had been copied in, and when it ended waiting, copying out the
                previous chunk, reducing, and copying in the next chunk. The last three are the start and the
                end of waiting for the last results, and the end of the batch.
            every: Number of chunks that each recorded chunk represents.
        """
        self.ring.add(_CHUNK, 0, set_id, 0, 0, 0, marks[1] - marks[0], when=marks[0])
        for at in range(1, len(marks) - 3, 5):
            began, waited, copied, reduced, end = marks[at : at + 5]
            phases = (waited - began) // 1000, copied - waited, reduced - copied, end - reduced
            self.ring.add(_CHUNK, 0, set_id, *phases, every, when=began)
        began, waited, copied = marks[-3:]
        self.ring.add(_CHUNK, 0, set_id, (waited - began) // 1000, copied - waited, when=began)

    def steps_text(self) -> str:
        """Return this rank's progress, as formatted by ``ring.steps_text``."""
        self.publish()
        return steps_text(self.words)

    def text(self, what: str) -> None:
        """Record an event. ``what`` describes it."""
        self.ring.add(Kind.TEXT, self.ring.label(what))

    def _records(self) -> list[dict[str, Any]]:
        self.publish()
        reader = RingReader(self.ring.memory)
        offset = self.words[Word.EPOCH_OFFSET]
        entries = []
        for record in reader.last(_RECORDS):
            names = reader.name(record.label)
            entry = {"time": (record.time + offset) / 1e9, "kind": Kind(record.kind).name.lower()}
            if record.kind == Kind.BATCH:
                round_number, duration, kind, low, high = record.values
                entry["details"] = {
                    "process_set": record.set_id, "round": round_number, "operation": Collective(kind).name,
                    "names": [names] if isinstance(names, str) else names, "bytes": low | high << 32,
                    "seconds": duration / 1e6,
                }  # fmt: skip
            else:
                entry["details"] = names
            entries.append(entry)
        return entries

    def dump(self, who: Identity, reason: str, pending: list[str], named: bool = True) -> str | None:
        """Write the latest records to a JSON file. Returns its path, or None if it was not written.

        Args:
            who: This rank.
            reason: Reason for the dump.
            pending: Names of the requests in flight.
            named: True if an error message will contain the path. Otherwise, the file is written only if a
                directory for flight records is set.
        """
        if not (named or self._directory):
            return None
        content = {
            "rank": who.rank, "host": who.host, "pid": who.pid,
            "reason": reason, "pending": pending, "records": self._records(),
        }  # fmt: skip
        return self.save("flight", who, json.dumps(content, default=str, indent=1))

    def save(self, kind: str, who: Identity, text: str) -> str | None:
        """Write a file to the directory for flight records. Returns its path, or None on failure.

        Args:
            kind: "flight" or "stall" for JSON, "stacks" for text.
            who: The rank.
            text: Content of the file.
        """
        ending = "txt" if kind == "stacks" else "json"
        try:
            directory = self._directory or tempfile.gettempdir()
            path = os.path.join(directory, f"ringdance-{kind}-rank{who.rank}-{who.pid}.{ending}")
            os.makedirs(directory, exist_ok=True)
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError:
            return None
        return path
