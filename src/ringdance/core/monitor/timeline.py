"""Convert the ranks' records to trace events.

Event names are the same as in Horovod. Each tensor is a process in the trace, with a thread for each rank.
NEGOTIATE_ALLREDUCE lasts from the rank's submission until all ranks have agreed. It is followed by ALLREDUCE,
with its activities. Each rank is also a process, with batches, chunks, waits and steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from ringdance.core.monitor.activities import activities, chunks_of, phases
from ringdance.core.monitor.chrome import ChromeWriter
from ringdance.core.request import Collective
from ringdance.core.ring import Kind, Label, Record, Who

# First process ids of ranks and of tensors. Perfetto treats thread 0 as the thread whose number equals the
# process id, so no process id may equal a rank.
_RANKS, _TENSORS = 1_000_000, 2_000_000
_THREADS = ("batches", "chunks", "waits", "steps")
_BATCHES, _CHUNKS, _WAITS, _STEPS = range(4)


class Timeline:
    """The trace of a job.

    Args:
        writer: Writer of the trace file.
    """

    def __init__(self, writer: ChromeWriter) -> None:
        self.writer = writer
        self._tensors: dict[str, int] = {}
        self._threads: set[tuple[int, int]] = set()
        self._submitted: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self._chunks: dict[tuple[int, int], list[Record]] = defaultdict(list)
        self._ranks: set[int] = set()
        self._last: dict[int, int] = {}  # time of the last record, by rank
        self._uncertainties: dict[int, int] = {}

    def add(
        self, who: Who, name_of: Callable[[int], Label], records: Iterable[Record], offset: int = 0,
        uncertainty: int = 0, lost: int = 0,
    ) -> None:  # fmt: skip
        """Add one rank's records.

        Args:
            who: The rank.
            name_of: Maps a label number to its label.
            records: The records, oldest first.
            offset: Nanoseconds to add to the rank's clock.
            uncertainty: Uncertainty of the offset, in nanoseconds.
            lost: Number of records that were overwritten in the ring just before these.
        """
        rank, pid = who.rank, _RANKS + who.rank
        if rank not in self._ranks:
            self._ranks.add(rank)
            self.writer.process(pid, f"rank {rank} on {who.host} (pid {who.pid})", rank - _RANKS)
            for tid, text in enumerate(_THREADS):
                self.writer.thread(pid, tid, text)
        for record in records:
            record = record._replace(time=record.time + offset)
            if lost:
                self._lose(rank, lost, record.time)
                lost = 0
            if uncertainty != self._uncertainties.get(rank, 0):
                self._uncertainties[rank] = uncertainty
                self.writer.counter(pid, "uncertainty of the clock, us", record.time, uncertainty / 1000)
            self._last[rank] = record.time
            if record.kind == Kind.SUBMIT:
                self._submit(rank, str(name_of(record.label)), record)
            elif record.kind == Kind.BATCH:
                names = name_of(record.label)
                self._batch(rank, (names,) if isinstance(names, str) else names, record)
            elif record.kind == Kind.CHUNK:
                self._chunks[rank, record.set_id].append(record)
            elif record.kind == Kind.WAIT:
                began, name = record.time - record.values[0] * 1000, str(name_of(record.label))
                self.writer.span(pid, _WAITS, "WAIT", began, record.time, tensor=name)
            elif record.kind == Kind.ROUND:
                self.writer.instant(pid, _STEPS, "CYCLE_START", record.time)
            elif record.kind == Kind.STEP and record.values[1]:
                self.writer.instant(pid, _STEPS, f"step {record.values[0]}", record.time)
            elif record.kind == Kind.TEXT:
                self.writer.instant(pid, _STEPS, str(name_of(record.label)), record.time)

    def _lose(self, rank: int, count: int, when: int) -> None:
        """Mark a gap, and drop open spans, because the end of a later span could be mistaken for theirs."""
        self.writer.span(_RANKS + rank, _STEPS, f"{count} records lost", self._last.get(rank, when), when)
        for key in [key for key in self._submitted if key[0] == rank]:
            for began, _ in self._submitted.pop(key):
                self.writer.end(self._tensor(key[2], rank), rank, "", began, lost=True)
        for place in [place for place in self._chunks if place[0] == rank]:
            del self._chunks[place]

    def _tensor(self, name: str, rank: int) -> int:
        """Return the process id of a tensor. On first use, name the process and the rank's thread in it."""
        pid = self._tensors.get(name)
        if pid is None:
            pid = self._tensors[name] = _TENSORS + len(self._tensors)
            self.writer.process(pid, name, pid - _TENSORS)
        if (pid, rank) not in self._threads:
            self._threads.add((pid, rank))
            self.writer.thread(pid, rank, f"rank {rank}")
        return pid

    def _submit(self, rank: int, name: str, record: Record) -> None:
        low, high, collective, *_ = record.values
        self._submitted[rank, record.set_id, name].append((record.time, low | high << 32))
        pid = self._tensor(name, rank)
        self.writer.begin(pid, rank, f"NEGOTIATE_{Collective(collective).name}", record.time)
        self.writer.span(pid, rank, str(rank), record.time, record.time)

    def _batch(self, rank: int, names: tuple[str, ...], record: Record) -> None:
        number, duration, collective, low, high = record.values
        began, kind = record.time - duration * 1000, Collective(collective).name
        writer, chunks = self.writer, chunks_of(self._chunks.pop((rank, record.set_id), []))
        submitted = []
        for name in names:
            waiting = self._submitted[rank, record.set_id, name]
            submitted.append(waiting.popleft() if waiting else (0, 0))
        if not any(when for when, _ in submitted):
            return  # not one of the steps for which a timeline was requested
        writer.span(
            _RANKS + rank, _BATCHES, kind, began, record.time,
            round=number, bytes=low | high << 32, tensors=len(names), process_set=record.set_id,
        )  # fmt: skip
        for name, start, end in phases(chunks):
            writer.span(_RANKS + rank, _CHUNKS, name, start, end)
        spans = activities(chunks, [nbytes for _, nbytes in submitted])
        for name, (when, nbytes), parts in zip(names, submitted, spans, strict=True):
            if not when:
                continue  # the request was submitted before the timeline started
            pid = self._tensor(name, rank)
            writer.end(pid, rank, f"NEGOTIATE_{kind}", began, round=number, process_set=record.set_id)
            writer.begin(pid, rank, kind, began)
            for text, start, end in parts:
                writer.span(pid, rank, text, start, end)
            writer.end(pid, rank, kind, record.time, bytes=nbytes)
