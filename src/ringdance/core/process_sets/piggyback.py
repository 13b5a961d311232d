"""Small all-reduces whose data travel with the vectors: a round is also their exchange.

If all members choose the same cache entry, that takes one synchronization instead of two.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ringdance.core.exchange import aligned_empty
from ringdance.core.exchange.arithmetic import reduction
from ringdance.core.labels import label_of
from ringdance.core.process_sets.agreement import PIGGYBACK_ENTRIES, CacheEntry, Piggyback, VectorLayout
from ringdance.core.process_sets.batch import description_bytes
from ringdance.core.process_sets.pending import PendingRequests
from ringdance.core.recorder import BatchRecord, Recorder
from ringdance.core.request import Collective, Description, ReduceOp
from ringdance.core.transport.window import PIGGYBACK_BYTES, Window


@dataclass(eq=False)
class Piggybacking:
    """Piggybacks data on one process set's vectors, on a host.

    Thread: the one stepping the engine.

    Attributes:
        set_id: Number of the set.
        window: The members' shared memory.
        layout: Layout of the vectors.
        pending: The requests in flight.
        lock: Guards ``pending``.
        recorder: Receives a record of each all-reduce.
    """

    set_id: int
    window: Window
    layout: VectorLayout
    pending: PendingRequests
    lock: AbstractContextManager[Any]
    recorder: Recorder
    _loaded: CacheEntry | None = None

    def plan(self, slot: int, name: str, d: Description) -> Piggyback | None:
        """Return how a cached request's data are piggybacked, or None if they do not fit."""
        if d.kind != Collective.ALLREDUCE or d.operation == ReduceOp.ADASUM or d.detail or d.device:
            return None
        nbytes = description_bytes(d)
        if len(d.shapes) != 1 or nbytes > PIGGYBACK_BYTES or slot >= PIGGYBACK_ENTRIES:
            return None
        how = reduction(d.dtypes[0], d.operation, d.prescale, d.postscale, self.window.members)
        if how.pairs:
            return None
        buffers = [
            [memory[:nbytes].view(how.dtype).reshape(d.shapes[0]) for memory in row]
            for row in self.window.piggybacks
        ]
        label = self.recorder.label(label_of(name))
        record = BatchRecord(self.set_id, Collective.ALLREDUCE, label, nbytes)
        return Piggyback(1 << slot, self.layout.piggyback(slot), how, buffers, record)

    def load(self, ready: int) -> int:
        """Copy the first ready request's data next to the vector if they fit. Returns the vector's field.

        Lock: the caller holds ``lock``.
        """
        entry = self._loaded = self.pending.cache.entries[(ready & -ready).bit_length() - 1]
        if entry is None or (piggyback := entry.piggyback) is None:
            return 0
        window = self.window
        piggyback.reduction.prepare(
            self.pending.named[entry.name].request.inputs[0],
            piggyback.buffers[window.vector_parity ^ 1][window.index],
        )
        return piggyback.field

    def complete(self, agreed: int, round_number: int) -> int:
        """Reduce the data if all members loaded the same entry. Returns the entry's bit, otherwise 0.

        ``agreed``: The AND of the vectors. If a member loaded nothing, its piggyback field is 0.
        """
        entry, pending = self._loaded, self.pending
        if entry is None or (piggyback := entry.piggyback) is None:
            return 0
        if agreed & piggyback.field != piggyback.field:
            return 0
        work, how = pending.named[entry.name], piggyback.reduction
        buffers, outputs = piggyback.buffers[self.window.vector_parity], work.request.outputs
        target = aligned_empty(buffers[0].shape, how.dtype) if outputs is None else outputs[0]
        how.combine(buffers, target)
        if how.late:
            how.deliver(target, target)
        entry.used = round_number
        with self.lock:
            pending.ready &= ~piggyback.bit
            del pending.named[entry.name]
        self.recorder.small_batch(piggyback.record, round_number)
        work.finish([target])
        return piggyback.bit
