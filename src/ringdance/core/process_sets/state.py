"""One process set: the state machine by which its members agree, round by round.

``steps()`` is a generator. Each ``next()`` advances as far as possible without blocking. It runs rounds: all
members AND their vectors (see ``agreement``), execute what is ready everywhere, then exchange cache misses.
Only ``due`` decides when to enter a round. What happens in the round depends only on agreed facts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from ringdance.core.callers import Callers
from ringdance.core.collectives import AgreedRequest
from ringdance.core.exchange import Exchange, Steps
from ringdance.core.process_sets.agreement import (
    CONTINUE,
    HAS_UNNAMED,
    NO_WAITER,
    UNNAMED,
    CacheEntry,
    VectorLayout,
    set_bits,
)
from ringdance.core.process_sets.encoding import decode_misses, encode_misses
from ringdance.core.process_sets.executor import Executor
from ringdance.core.process_sets.pending import PendingRequests
from ringdance.core.process_sets.piggyback import Piggybacking
from ringdance.core.ring import Kind
from ringdance.core.transport.base import Transport
from ringdance.core.transport.window import Window
from ringdance.settings import Settings

_MISSES_AT_ONCE = 256
_MAX_BACKOFF = 0.010


class EngineValues(NamedTuple):
    """Values that can change while the engine runs. Sizes are in bytes, times in milliseconds."""

    fusion_threshold: int
    cycle_time: float
    chunk_bytes: int
    wire_bytes: int
    flat: bool  # if True, skip the stage within hosts


def eager_due(since: float, last: float, cycle: float) -> float:
    """Return when asynchronous requests are due, given the submission times of the first and the last one.

    They are due after a cycle, or once a burst has ended. Starting in the middle of a burst would split
    it in two, and the submitting thread and the engine thread would compete for the core.
    """
    return max(since + cycle, min(last + cycle / 8, since + 4 * cycle))


class ProcessSetState:
    """The members' agreement, as seen from one member.

    Args:
        set_id: Number of the set, or 0 for all ranks.
        transport: The members' communicator. Closed with the set.
        exchange: Moves the members' data.
        settings: The engine's settings.
        callers: The threads that are waiting, and what they are waiting for, in all sets.
        lock: Guards everything that submitting threads change.
        change: See ``Executor``.

    Attributes:
        pending: The requests in flight. Lock: ``lock``.
        members: Global ranks of the members.
        executor: Executes the agreed requests.
        rounds: Number of rounds so far.
        in_round: True during a round, in which the other members rely on this rank's vector.
        urgent: True if pending requests must start now.
        stopping: True once this rank has requested a stop.
        stopped: True once all members have agreed to stop.
        no_waiter: After the stop, True if no thread of any member was still waiting.
        leaving: True once this rank leaves the group.
        left: Times (monotonic) at which members have left the group, by global rank.
        why: Why a rank left the group without destroying it, or "" if no rank did.
    """

    def __init__(
        self, set_id: int, transport: Transport, exchange: Exchange, settings: Settings, callers: Callers,
        lock: AbstractContextManager[Any], change: Callable[[AgreedRequest], Steps] | None,
    ) -> None:
        self.set_id, self.transport, self.exchange = set_id, transport, exchange
        self._context, self._recorder = exchange.context, exchange.context.recorder
        self._callers, self._lock = callers, lock
        self._cycle = settings.cycle_time * 1e-3
        self.members = transport.members
        self.pending = PendingRequests(settings.cache_capacity)
        self.executor = Executor(
            set_id=set_id, transport=transport, exchange=exchange, pending=self.pending, lock=lock,
            threshold=settings.fusion_threshold, recorder=self._recorder, change=change,
        )  # fmt: skip
        self.rounds = 0
        self.in_round = False
        self.urgent = False
        self.stopping = False
        self.stopped = False
        self.no_waiter = True
        self.leaving = False
        self.left: dict[int, float] = {}
        self.why = ""
        self._layout = VectorLayout(transport.size)
        self._last_joined = -1
        self._window = window = transport.window if transport.one_host else None
        self._piggybacking: Piggybacking | None = None
        if window is not None:
            self._piggybacking = Piggybacking(self.executor, window, self._layout)
        self._width = -1
        self._views: list[tuple[memoryview, list[memoryview]]] = []

    def close(self) -> None:
        """Free the communicators. All members must do so while nothing is in flight."""
        for device in self.exchange.devices.values():
            device.close(True)
        self.transport.close(True)

    def left_since(self, ranks: Iterable[int]) -> float:
        """Return when the last of these ranks left the group (monotonic), or infinity if not all have."""
        return max(self.left.get(rank, math.inf) for rank in ranks)

    def removal(self) -> str:
        """Return the text of errors about operations that can never complete in this set."""
        if self.why:
            return self.why
        others = {rank: who for rank, who in enumerate(self.transport.identities) if who.rank in self.left}
        own = others.pop(self.transport.rank, None)
        who = ", ".join(map(str, others.values())) or str(own or "this rank")
        return (
            f"{who} has destroyed process group {self.set_id}, whose members are the ranks "
            f"{list(self.members)}, without making this call. Make the same calls on all members before "
            "destroy_process_group()."
        )

    def values(self) -> EngineValues:
        """Return the set's current ``EngineValues``."""
        exchange = self.exchange
        return EngineValues(
            fusion_threshold=self.executor.threshold, cycle_time=self._cycle * 1e3,
            chunk_bytes=exchange.chunk_bytes, wire_bytes=exchange.wire_bytes, flat=bool(exchange.flat),
        )  # fmt: skip

    def change(self, values: EngineValues) -> None:
        """Apply new values. Called between two batches, with the same values on all members."""
        executor, exchange = self.executor, self.exchange
        executor.threshold, self._cycle = values.fusion_threshold, values.cycle_time * 1e-3
        executor.plans.clear()
        if (values.chunk_bytes, values.wire_bytes) != (exchange.chunk_bytes, exchange.wire_bytes):
            exchange.set_chunks(values.chunk_bytes, values.wire_bytes)
        if exchange.flat is not None:
            exchange.flat = values.flat

    def _wanted_at(self) -> float | None:
        """Return the time (monotonic) from which this rank has a reason to enter a round. 0.0 means now.

        None means that there is no such reason until another event occurs. Threads: any.
        """
        pending = self.pending
        if not (pending.named or pending.unnamed or pending.join is not None):  # faster than has_work()
            return None
        if self._callers.waiting or self.urgent:
            return 0.0
        since = pending.eager_since  # read once: another thread's step may reset it
        return None if since is None else eager_due(since, pending.eager_last, self._cycle)

    def due(self) -> bool:
        """Return True if this rank should enter a round now. Thread: the one stepping the engine."""
        if self.stopping:
            return True
        wanted, pending = self._wanted_at(), self.pending
        if wanted is None or (wanted and time.monotonic() < wanted):
            return False
        if pending.backoff and time.monotonic() < pending.not_before:
            return self._window is not None and self._window.peer_ahead()
        return True

    def next_due(self) -> float | None:
        """Return the monotonic time at which the next round is due, 0 for now, or None. Threads: any.

        None means that no round becomes due until a request is submitted, or a thread starts to wait.
        """
        if self.in_round or self.stopping:
            return 0.0
        wanted = self._wanted_at()
        return None if wanted is None else max(wanted, self.pending.not_before)

    def steps(self) -> Steps:
        """Run rounds until all members have agreed to stop."""
        pending = self.pending
        while not self.stopped:
            if not self.due():
                yield
                continue
            self.in_round = True
            achieved = yield from self._round()
            self.in_round = False
            if self.urgent and not (pending.named or pending.unnamed or pending.join is not None):
                self.urgent = False
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
                yield  # do not check yet whether a round is due: after a lone operation, none is

    def _compose(self) -> int:
        """Build this rank's bit vector for the next round.

        Thread: the one stepping the engine. Lock: the caller holds ``self._lock``.
        """
        layout, pending = self._layout, self.pending
        vector = layout.neutral
        for work in list(self._callers.waiting.values()):  # Note [Copies of dictionaries]
            # Skip completed works: their threads are about to continue.
            if not work.complete and work.request.set_id == self.set_id:
                vector = layout.waiting
                break
        if not (pending.unnamed or pending.misses or self.stopping or pending.join is not None):  # fast path
            ready = pending.ready
            vector ^= ready << layout.ready_at | HAS_UNNAMED
            if ready and self._piggybacking is not None:
                vector |= self._piggybacking.load(ready)
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
            if not window.reached():  # check again before the slow path: peers are often just behind
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
            if ready and self._piggybacking is not None:
                ready ^= self._piggybacking.complete(agreed, self.rounds)
            if ready:
                yield from self.executor.run_ready(ready, self.rounds)
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
            yield from self.executor.run_unnamed(layout.equal_unnamed(agreed), self.rounds)
            achieved = True
        if ready:
            yield from self.executor.run_ready(ready, self.rounds)
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
                # Misses that were never announced come first, then those announced longest ago.
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
                if self._piggybacking is not None and not mismatched:
                    entry.piggyback = self._piggybacking.plan(slot, entry)
                if agreed >> 2 * number & 2:
                    installed.append((slot, entry))
            self.executor.plans.clear()
            pending.look_up_all()
        # A small cache may not hold all these entries. One that has already been evicted is a miss again.
        ready = [slot for slot, entry in installed if pending.cache.entries[slot] is entry]
        yield from self.executor.run_slots(ready, self.rounds)
        return bool(ready)
