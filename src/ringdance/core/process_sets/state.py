"""One process set: the state machine by which its members agree, round by round.

``steps()`` is a generator. Each ``next()`` does what can be done without blocking. It runs rounds: all
members AND their vectors (see ``agreement``), execute what is ready everywhere, then exchange cache misses.
Only ``due`` decides when to enter a round. What happens in the round follows from agreed facts only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ringdance.core.callers import Callers
from ringdance.core.exchange import Steps, aligned_empty
from ringdance.core.exchange.arithmetic import Reduction, reduction
from ringdance.core.labels import label_of
from ringdance.core.process_sets.agreement import (
    CONTINUE,
    HAS_UNNAMED,
    NO_WAITER,
    PIGGYBACK_ENTRIES,
    UNNAMED,
    CacheEntry,
    Piggyback,
    VectorLayout,
    set_bits,
)
from ringdance.core.process_sets.batch import description_bytes
from ringdance.core.process_sets.encoding import decode_misses, encode_misses
from ringdance.core.process_sets.executor import Executor
from ringdance.core.recorder import BatchRecord
from ringdance.core.request import Collective, Description, ReduceOp, Work
from ringdance.core.ring import Kind
from ringdance.core.transport.window import PIGGYBACK_BYTES, Window

_MISSES_AT_ONCE = 256
_MAX_BACKOFF = 0.010


class EngineValues(NamedTuple):
    """Values that can change while the engine runs. Sizes in bytes, times in milliseconds."""

    fusion_threshold: int
    cycle_time: float
    chunk_bytes: int
    wire_bytes: int
    flat: bool  # True to skip the stage within hosts


def eager_due(since: float, last: float, cycle: float) -> float:
    """Return when asynchronous requests are due, given the submission times of the first and the last one.

    They are due after a cycle, or once a burst has ended. Starting in the middle of a burst would cut it in
    two, and both threads would compete for the core.
    """
    return max(since + cycle, min(last + cycle / 8, since + 4 * cycle))


class ProcessSetState:
    """The members' agreement, as seen from one member.

    Args:
        executor: Executes what is agreed. Holds the set's number, transport, exchange and pending requests.
        callers: What threads wait for, in all sets.
        cycle_seconds: Seconds that an asynchronous request may wait for others.

    Attributes:
        pending: The requests in flight.
        members: Global ranks of the members.
        rounds: Number of rounds so far.
        in_round: True during a round. The other members then rely on this rank's vector.
        urgent: True to start what is pending now.
        stopping: True if this rank wants to stop.
        stopped: True once all members have agreed to stop.
        no_waiter: After the stop, True if no thread was left waiting.
        leaving: True once this rank has left the group.
        left: Global ranks known to have left the group, with the time (monotonic).
        why: Reason why a rank has left the group, if it did not destroy the group.
    """

    def __init__(self, executor: Executor, callers: Callers, cycle_seconds: float) -> None:
        self._executor, self._callers = executor, callers
        self._cycle = cycle_seconds
        self._lock, self._recorder = executor.lock, executor.recorder
        self.set_id, self.pending = executor.set_id, executor.pending
        self.transport, self.exchange = transport, exchange = executor.transport, executor.exchange
        self.members = transport.members
        self.rounds = 0
        self.in_round = False
        self.urgent = False
        self.stopping = False
        self.stopped = False
        self.no_waiter = True
        self.leaving = False
        self.left: dict[int, float] = {}
        self.why = ""
        self._context = exchange.context
        self._layout = VectorLayout(transport.size)
        self._last_joined = -1
        self._window = transport.window if transport.one_host else None
        self._piggyback: (
            tuple[int, int, CacheEntry, Work, Reduction, list[np.ndarray[Any, Any]], BatchRecord] | None
        ) = None
        self._width = -1
        self._views: list[tuple[memoryview, list[memoryview]]] = []

    def close(self) -> None:
        """Free the communicators. All members must do so, with nothing in flight."""
        for device in self.exchange.devices.values():
            device.close(True)
        self.transport.close(True)

    def left_since(self, ranks: Iterable[int]) -> float:
        """Return when the last of these ranks left the group (monotonic), infinity if not all have."""
        return max(self.left.get(rank, math.inf) for rank in ranks)

    def removal(self) -> str:
        """Return the text of errors about operations that can never complete in this set."""
        if self.why:
            return self.why
        others = {rank: who for rank, who in enumerate(self.transport.identities) if who.rank in self.left}
        own = others.pop(self.transport.rank, None)
        who = ", ".join(map(str, others.values())) or str(own or "this rank")
        return (
            f"{who} has destroyed process group {self.set_id} of the ranks {list(self.members)} without this "
            "call: make the same calls on all members before destroy_process_group()."
        )

    def values(self) -> EngineValues:
        """Return the current values."""
        exchange, chunks = self.exchange, (self.exchange.chunk_bytes, self.exchange.wire_bytes)
        return EngineValues(self._executor.threshold, self._cycle * 1e3, *chunks, bool(exchange.flat))

    @property
    def largest(self) -> tuple[int, int, int]:
        """Maximum all-reduces and bytes per round, and bytes per batch, so far. Equal on all members."""
        return self._executor.largest

    def change(self, values: EngineValues) -> None:
        """Continue with other values. Called between two batches, equally on all members."""
        executor, exchange = self._executor, self.exchange
        executor.threshold, self._cycle = values.fusion_threshold, values.cycle_time * 1e-3
        executor.plans.clear()
        if (values.chunk_bytes, values.wire_bytes) != (exchange.chunk_bytes, exchange.wire_bytes):
            exchange.set_chunks(values.chunk_bytes, values.wire_bytes)
        if exchange.flat is not None:
            exchange.flat = values.flat

    def due(self) -> bool:
        """Return True if this rank should enter a round now."""
        if self.stopping:
            return True
        pending = self.pending
        if not (pending.named or pending.unnamed or pending.join is not None):
            self.urgent = False
            return False
        since = pending.eager_since
        if not (self._callers.waiting or self.urgent) and (
            since is None or time.monotonic() < eager_due(since, pending.eager_last, self._cycle)
        ):
            return False
        if pending.backoff and time.monotonic() < pending.not_before:
            return self._window is not None and self._window.peer_ahead()
        return True

    def takes_part(self) -> bool:
        """Return True if this rank enters rounds now, or will within a cycle time."""
        pending_here = self._callers.waiting or self.urgent or self.pending.eager_since is not None
        return self.in_round or bool(pending_here)

    def next_due(self) -> float | None:
        """Return the time (monotonic) at which a round becomes due without further events, or None."""
        pending = self.pending
        if not (pending.named or pending.unnamed or pending.join is not None):  # has_work(), twice as fast
            return None
        if self._callers.waiting or self.urgent:
            return pending.not_before
        since = pending.eager_since  # read once: another thread's step may reset it
        if since is None:
            return None
        return max(eager_due(since, pending.eager_last, self._cycle), pending.not_before)

    def steps(self) -> Steps:
        """Run until all members have agreed to stop."""
        pending = self.pending
        while not self.stopped:
            if not self.due():
                yield
                continue
            self.in_round = True
            achieved = yield from self._round()
            self.in_round = False
            if pending.held or pending.eager_since is not None:
                with self._lock:
                    if pending.held:
                        pending.release_held()
                    if achieved and pending.eager_since is not None:
                        pending.eager_since = time.monotonic() if pending.has_work() else None
            if achieved:
                pending.backoff = 0.0
            else:
                pending.backoff = min(max(2 * pending.backoff, 5e-5), _MAX_BACKOFF)
                pending.not_before = time.monotonic() + pending.backoff
            if not self.stopped:
                yield  # without checking what is due: after a lone operation nothing is

    def _compose(self) -> int:
        """Build this rank's bit vector for the next round.

        Thread: the one stepping the engine. Lock: the caller holds ``self._lock``.
        """
        layout, pending = self._layout, self.pending
        vector = layout.neutral
        for work in list(self._callers.waiting.values()):  # Note [Copies of dictionaries]
            # If the work is complete, its thread is about to continue.
            if not work.complete and work.request.set_id == self.set_id:
                vector = layout.waiting
                break
        self._piggyback = None
        if not (pending.unnamed or pending.misses or self.stopping or pending.join is not None):  # fast path
            ready = pending.ready
            vector ^= ready << layout.ready_at | HAS_UNNAMED
            if ready and self._window is not None:
                vector |= self._load_piggyback(self._window, ready)
            return vector
        rank = self.transport.rank
        if self.stopping:
            vector ^= CONTINUE
        if pending.join is not None:
            pending.withdraw_tuning()
            pending.joined_here |= not (pending.named or pending.unnamed)
        if pending.joined_here:
            vector ^= 1 << (layout.joined_at + rank)
            return vector | ((1 << len(pending.cache.entries)) - 1) << layout.ready_at
        if pending.joined:
            pending.name_unnamed()
        if pending.unnamed:
            vector ^= layout.unnamed_field
            first = [pending.unnamed[i] for i in range(min(UNNAMED, len(pending.unnamed)))]
            vector |= layout.unnamed([work.request.description.digest() for work in first])
        else:
            vector ^= HAS_UNNAMED
        if pending.misses:
            vector ^= 1 << (layout.misses_at + rank)
        return vector | pending.ready << layout.ready_at

    def _load_piggyback(self, window: Window, ready: int) -> int:
        """Piggyback the first ready request's data on the vector if they fit. Returns the vector's field.

        If all members choose the same entry, the round is also its exchange: one synchronization, not two.
        """
        pending = self.pending
        slot = (ready & -ready).bit_length() - 1
        entry = pending.cache.entries[slot]
        if entry is None or entry.piggyback is None:
            return 0
        field, how, buffers, record = entry.piggyback
        parts = buffers[window.vector_parity ^ 1]
        work = pending.named[entry.name]
        how.prepare(work.request.inputs[0], parts[window.index])
        self._piggyback = (field, slot, entry, work, how, parts, record)
        return field

    def _complete_piggyback(self) -> int:
        """Reduce the piggybacked data. Returns the entry's bit."""
        assert self._piggyback is not None
        _, slot, entry, work, how, parts, record = self._piggyback
        outputs = work.request.outputs
        target = aligned_empty(parts[0].shape, how.dtype) if outputs is None else outputs[0]
        how.combine(parts, target)
        if how.late:
            how.deliver(target, target)
        entry.used = self.rounds
        pending = self.pending
        with self._lock:
            pending.ready &= ~(1 << slot)
            del pending.named[entry.name]
        self._recorder.small_batch(record, self.rounds)
        work.finish([target])
        return 1 << slot

    def _piggyback_of(self, slot: int, name: str, d: Description) -> Piggyback | None:
        """Return how a cached request's data are piggybacked, or None if they do not fit."""
        window = self._window
        if window is None or d.kind != Collective.ALLREDUCE or d.operation == ReduceOp.ADASUM:
            return None
        if d.detail or d.device:
            return None
        nbytes = description_bytes(d)
        if len(d.shapes) != 1 or nbytes > PIGGYBACK_BYTES or slot >= PIGGYBACK_ENTRIES:
            return None
        how = reduction(d.dtypes[0], d.operation, d.prescale, d.postscale, self.transport.size)
        if how.pairs:
            return None
        shape = d.shapes[0]
        buffers = [
            [room[:nbytes].view(how.dtype).reshape(shape) for room in rooms] for rooms in window.piggybacks
        ]
        label = self._recorder.label(label_of(name))
        record = BatchRecord(self.set_id, Collective.ALLREDUCE, label, nbytes)
        return self._layout.piggyback(slot), how, buffers, record

    def _agree(self, vector: int, width: int) -> Steps:
        """AND ``vector`` (``width`` bytes) over all members."""
        window = self._window
        if window is not None:
            if width != self._width:
                self._set_width(window, width)
            window.vector_parity ^= 1
            own_vector, others = self._views[window.vector_parity]
            own_vector[:] = vector.to_bytes(width, "little")
            window.signal()
            if not window.reached():  # a peer is often just behind: check twice before the slower way
                while not window.reached():
                    yield
            for raw in others:
                vector &= int.from_bytes(raw, "little")
        else:
            buffer = np.frombuffer(vector.to_bytes(width, "little"), np.uint8).copy()
            pending = self.transport.allreduce(buffer, "and")
            while not pending.test():
                yield
            vector = int.from_bytes(buffer.tobytes(), "little")
        self._context.achieved += 1
        return vector

    def _set_width(self, window: Window, width: int) -> None:
        self._width = width
        self._views = []
        for vectors in window.vectors:
            cut = [vector[:width] for vector in vectors]
            self._views.append((cut.pop(window.index), cut))

    def _round(self) -> Steps:
        """Agree once and execute the result. Returns True if anything made progress."""
        layout, pending = self._layout, self.pending
        with self._lock:
            vector = self._compose()
        agreed = yield from self._agree(vector, (layout.ready_at + len(pending.cache.entries) + 7) >> 3)
        self.rounds += 1
        if self._recorder.read_detail() > 1:
            self._recorder.ring.add(Kind.ROUND, 0, self.set_id, self.rounds)
        ready = agreed >> layout.ready_at
        if agreed & layout.plain_mask == layout.plain and not pending.joined:  # fast path: only cache hits
            achieved = ready != 0
            if self._piggyback is not None and agreed & self._piggyback[0] == self._piggyback[0]:
                ready ^= self._complete_piggyback()
            if ready:
                yield from self._executor.run_ready(ready, self.rounds)
            return achieved
        if not agreed & CONTINUE:
            self.no_waiter = bool(agreed & NO_WAITER)
            self.stopped = True
            return True
        joined = layout.everyone & ~(agreed >> layout.joined_at)
        achieved = bool(joined & ~pending.joined)
        if achieved:
            self._last_joined = self.members[set_bits(joined & ~pending.joined)[-1]]
        pending.joined = joined
        if joined == layout.everyone:
            with self._lock:
                work = pending.all_joined()
            if work is not None:
                work.finish(self._last_joined)
            return True
        if agreed & HAS_UNNAMED and not joined:
            yield from self._executor.run_unnamed(layout.equal_unnamed(agreed), self.rounds)
            achieved = True
        if ready:
            yield from self._executor.run_ready(ready, self.rounds)
            achieved = True
        misses = layout.everyone & ~(agreed >> layout.misses_at)
        if misses:
            achieved |= yield from self._exchange_misses(set_bits(misses)[0])
        return achieved

    def _exchange_misses(self, leader: int) -> Steps:
        """Add the leader's cache misses to all caches, and execute those that are ready everywhere."""
        pending, items = self.pending, []
        if self.transport.rank == leader:
            with self._lock:
                # Misses that were never announced, or the longest time ago, come first.
                chosen = sorted(pending.misses.copy().items(), key=lambda item: item[1].announced)
                for name, work in chosen[: min(_MISSES_AT_ONCE, pending.cache.capacity)]:
                    work.announced = self.rounds
                    items.append((name, work.request.description))
        items = decode_misses((yield from self.exchange.broadcast_bytes(encode_misses(items), leader)))
        with self._lock:
            answer = pending.answer(items)
        agreed = yield from self._agree(answer, -(-len(items) // 4))
        installed = []
        with self._lock:
            for number, (name, description) in enumerate(items):
                mismatched = not agreed >> 2 * number & 1
                entry = CacheEntry(name, description, self.rounds, mismatched)
                slot = pending.cache.install(entry)
                entry.piggyback = None if mismatched else self._piggyback_of(slot, name, description)
                if agreed >> 2 * number & 2:
                    installed.append((slot, entry))
            self._executor.plans.clear()
            pending.look_up_all()
        # A small cache may not hold them all. An entry that was evicted again is a miss once more.
        ready = [slot for slot, entry in installed if pending.cache.entries[slot] is entry]
        yield from self._executor.run_slots(ready, self.rounds)
        return bool(ready)
