"""Small all-reduces whose data travel with the vectors, so that a round of agreement also exchanges the data.

If all members choose the same cache entry, its all-reduce takes one synchronization instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringdance.core.exchange import aligned_empty
from ringdance.core.process_sets.agreement import PIGGYBACK_ENTRIES, CacheEntry, Piggyback, VectorLayout
from ringdance.core.process_sets.batch import is_plain
from ringdance.core.process_sets.executor import Executor
from ringdance.core.transport.window import PIGGYBACK_BYTES, Window


@dataclass(eq=False)
class Piggybacking:
    """Piggybacks data on one process set's vectors within a host.

    Thread: the one stepping the engine.

    Attributes:
        executor: The set's executor.
        window: The members' shared memory.
        layout: Layout of the vectors.
    """

    executor: Executor
    window: Window
    layout: VectorLayout
    _loaded: CacheEntry | None = None

    def plan(self, slot: int, entry: CacheEntry) -> Piggyback | None:
        """Return how the data of the entry in a slot are piggybacked, or None if they are not."""
        d = entry.description
        if not is_plain(d) or len(d.shapes) != 1 or slot >= PIGGYBACK_ENTRIES:
            return None
        batch = self.executor.batch_of([entry])
        how, nbytes = batch.reduction, batch.record.nbytes
        if how.pairs or nbytes > PIGGYBACK_BYTES:
            return None
        buffers = [
            [memory[:nbytes].view(how.dtype).reshape(d.shapes[0]) for memory in row]
            for row in self.window.piggybacks
        ]
        return Piggyback(batch.bits, self.layout.piggyback(slot), how, buffers, batch.record)

    def load(self, ready: int) -> int:
        """Copy the first ready request's data next to the vector if they fit.

        Returns the vector's piggyback field, or 0 if nothing was copied. Lock: the caller holds
        ``executor.lock``.
        """
        pending = self.executor.pending
        entry = self._loaded = pending.cache.entries[(ready & -ready).bit_length() - 1]
        if entry is None or (piggyback := entry.piggyback) is None:
            return 0
        window = self.window
        piggyback.reduction.prepare(
            pending.named[entry.name].request.inputs[0],
            piggyback.buffers[window.vector_parity ^ 1][window.index],
        )
        return piggyback.field

    def complete(self, agreed: int, round_number: int) -> int:
        """Reduce the data if all members loaded the same entry. Returns the entry's bit if so, otherwise 0.

        ``agreed``: The AND of the vectors. If a member loaded nothing, its piggyback field is 0.
        """
        entry, executor = self._loaded, self.executor
        if entry is None or (piggyback := entry.piggyback) is None:
            return 0
        if agreed & piggyback.field != piggyback.field:
            return 0
        pending = executor.pending
        work, how = pending.named[entry.name], piggyback.reduction
        buffers, outputs = piggyback.buffers[self.window.vector_parity], work.request.outputs
        target = aligned_empty(buffers[0].shape, how.dtype) if outputs is None else outputs[0]
        how.combine(buffers, target)
        if how.late:
            how.deliver(target, target)
        entry.used = round_number
        with executor.lock:
            pending.ready &= ~piggyback.bit
            del pending.named[entry.name]
        executor.recorder.small_batch(piggyback.record, round_number)
        work.finish([target])
        return piggyback.bit
