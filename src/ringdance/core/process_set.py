"""One process set: the state machine by which its members agree, round by round.

``steps()`` is a generator; each ``next()`` does what can be done without waiting. It runs
rounds: all members AND their vectors (see ``agreement``), execute what is ready everywhere,
then deal with news. When to enter a round is decided here alone (``due``); what happens in it
follows from agreed facts only.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ringdance.core.agreed import AgreedRequests
from ringdance.core.agreement import CALM, GO, HEAD, RIDER_SLOTS, RUN, Entry, Rides, run_digest, set_bits
from ringdance.core.batch import description_bytes
from ringdance.core.encoding import decode_news, encode_news
from ringdance.core.exchange import Exchange, Steps, aligned_empty
from ringdance.core.exchange.arithmetic import Reduction, reduction
from ringdance.core.request import Collective, Description, ReduceOp, Work
from ringdance.transport.base import Transport
from ringdance.transport.window import RIDER_BYTES, Window

__all__ = ["ProcessSetState"]

_NEWS_AT_ONCE = 256
_LONGEST_PAUSE = 0.010


class ProcessSetState(AgreedRequests):
    """The members' agreement, as seen from one of them.

    Args:
        set_id: number of the set, 0 for all ranks.
        transport: the members' communicator.
        exchange: how they move data.
        cycle_seconds: how long an asynchronous request may wait for company.
        others: see ``AgreedRequests``.
    """

    def __init__(
        self, set_id: int, transport: Transport, exchange: Exchange, *, cycle_seconds: float, **others: Any
    ) -> None:
        super().__init__(set_id, transport, exchange, **others)
        self.waiting: dict[object, Work] = {}  # what threads wait for in this set
        self.urgent = False
        self.stopping = False
        self.stopped = False
        self.calm = True  # after the stop: whether nobody was left waiting
        self._last_joined = -1
        self._window = transport.window if transport.one_host else None
        self._rider: tuple[int, Entry, Work, Reduction, list[np.ndarray[Any, Any]]] | None = None
        self._width = -1
        self._views: list[tuple[memoryview, list[memoryview]]] = []
        self._cycle = cycle_seconds

    # -- the driver --------------------------------------------------------------------------

    def due(self) -> bool:
        """Return whether this rank should enter a round now."""
        if self.stopping:
            return True
        if not (self.pending or self.unnamed or self.join_work is not None):
            self.urgent = False
            return False
        since = self.eager_since
        if not (self._progress.callers or self.urgent) and (
            since is None or time.monotonic() < self._eager_due(since)
        ):
            return False
        if self._pause and time.monotonic() < self.not_before:
            return self._window is not None and self._window.peer_ahead()
        return True

    def next_due(self) -> float | None:
        """Return the time (monotonic) at which a round becomes due by itself, or None."""
        if not self.has_work():
            return None
        if self._progress.callers or self.urgent:
            return self.not_before
        since = self.eager_since  # read once: a step in another thread may end what it tells of
        return None if since is None else max(self._eager_due(since), self.not_before)

    def _eager_due(self, since: float) -> float:
        """Return when what was submitted asynchronously is due: a cycle later, or once a burst has ended.

        Starting in the middle of a burst would cut it in two, and make both threads fight for the core.
        """
        return max(since + self._cycle, min(self.eager_last + self._cycle / 8, since + 4 * self._cycle))

    def steps(self) -> Steps:
        """Run until all members have agreed to stop."""
        while not self.stopped:
            if not self.due():
                yield
                continue
            self.in_round = True
            achieved = yield from self._round()
            with self._lock:
                self.in_round = False
                if self._held:
                    self._release()
                if achieved and self.eager_since is not None:
                    self.eager_since = time.monotonic() if self.has_work() else None
            if achieved:
                self._pause = 0.0
            else:
                self._pause = min(max(2 * self._pause, 5e-5), _LONGEST_PAUSE)
                self.not_before = time.monotonic() + self._pause

    def _compose(self) -> int:
        """Return this rank's vector. The lock is held."""
        layout = self._layout
        vector = layout.all_quiet
        self._rider = None
        if not (self.unnamed or self.news or self.stopping or self.join_work is not None):  # the usual case
            if self._ready and self._window is not None:
                vector |= self._load_rider(self._window)
            if self.waiting:
                vector ^= CALM
            return (vector ^ HEAD) | self._ready << layout.ready_at
        place = self.transport.rank
        if self.stopping:
            vector ^= GO
        if self.waiting:
            vector ^= CALM
        if self.join_work is not None and not (self.pending or self.unnamed):
            self._joined_here = True
        if self._joined_here:
            vector ^= 1 << (layout.joined_at + place)
            return vector | ((1 << len(self._table.entries)) - 1) << layout.ready_at
        if self.unnamed and self.joined:
            self._name_unnamed()
        if self.unnamed:
            vector ^= layout.unnamed_mask << layout.unnamed_at
            first = self.unnamed[0]
            run = 0
            if len(self.unnamed) >= RUN:
                run = run_digest([self.unnamed[i].request.description for i in range(RUN)])
            vector |= (
                layout.unnamed(first.order, first.request.description.digest(), run) << layout.unnamed_at
            )
        else:
            vector ^= HEAD
        if self.news:
            vector ^= 1 << (layout.news_at + place)
        return vector | self._ready << layout.ready_at

    def _load_rider(self, window: Window) -> int:
        """Let the data of the first ready request ride along if they are few; return the vector's field.

        If all members choose the same entry, the round is its exchange too: one meeting instead of two.
        """
        slot = (self._ready & -self._ready).bit_length() - 1
        entry = self._table.entries[slot]
        assert entry is not None
        if entry.rides is None or slot >= RIDER_SLOTS:
            return 0
        how, turns = entry.rides
        parts = turns[window.vector_turn ^ 1]
        work = self.pending[entry.name]
        how.prepare(work.request.inputs[0], parts[window.index])
        self._rider = (slot, entry, work, how, parts)
        return self._layout.rider(slot)

    def _rides(self, description: Description) -> Rides | None:
        """Return how the data of such a request are reduced, and where they lie, if they may ride along."""
        d, window = description, self._window
        if window is None or d.kind != Collective.ALLREDUCE or d.operation == ReduceOp.ADASUM or d.detail:
            return None
        nbytes = description_bytes(d)
        if len(d.shapes) != 1 or nbytes > RIDER_BYTES:
            return None
        how = reduction(d.dtypes[0], d.operation, d.prescale, d.postscale, self.transport.size)
        shape = d.shapes[0]
        return how, [[r[:nbytes].view(how.dtype).reshape(shape) for r in turn] for turn in window.riders]

    def _land_rider(self) -> int:
        """Reduce what rode along; return the entry's bit."""
        assert self._rider is not None
        slot, entry, work, how, parts = self._rider
        outputs = work.request.outputs
        target = aligned_empty(parts[0].shape, how.dtype) if outputs is None else outputs[0]
        how.combine(parts, target)
        if how.late:
            how.deliver(target, target)
        entry.used = self.rounds
        with self._lock:
            self._ready &= ~(1 << slot)
            del self.pending[entry.name]
        self._recorder.add("batch", (self.set_id, self.rounds, "ALLREDUCE", (entry.name,), 0.0))
        work.finish([target])
        return 1 << slot

    def _agree(self, vector: int, width: int) -> Steps:
        """AND ``vector`` (``width`` bytes) over all members."""
        window = self._window
        if window is not None:
            if width != self._width:
                self._set_width(window, width)
            window.vector_turn ^= 1
            mine, others = self._views[window.vector_turn]
            mine[:] = vector.to_bytes(width, "little")
            window.signal()
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
        self._progress.count += 1
        return vector

    def _set_width(self, window: Window, width: int) -> None:
        self._width = width
        self._views = []
        for vectors in window.vectors:
            cut = [vector[:width] for vector in vectors]
            self._views.append((cut.pop(window.index), cut))

    def _round(self) -> Steps:
        """One agreement and what follows from it; returns whether it achieved anything."""
        layout = self._layout
        with self._lock:
            vector = self._compose()
        agreed = yield from self._agree(vector, (layout.ready_at + len(self._table.entries) + 7) >> 3)
        self.rounds += 1
        if agreed & layout.plain_mask == layout.plain and not self.joined:
            # Only known tensors: the usual case.
            ready = agreed >> layout.ready_at
            if self._rider is not None and layout.same_rider(agreed):
                ready ^= self._land_rider()
                if not ready:
                    return True
            if ready:
                yield from self._run_ready(ready)
            return ready != 0
        if not agreed & GO:
            self.calm = bool(agreed & CALM)
            self.stopped = True
            return True
        achieved = self._see_joined(layout.everyone & ~(agreed >> layout.joined_at))
        if self.joined == layout.everyone:
            self._all_joined()
            return True
        if agreed & HEAD and not self.joined:
            achieved |= yield from self._run_unnamed(agreed)
        ready = agreed >> layout.ready_at
        if ready:
            yield from self._run_ready(ready)
            achieved = True
        news = layout.everyone & ~(agreed >> layout.news_at)
        if news:
            achieved |= yield from self._hear_news(set_bits(news)[0])
        return achieved

    def _see_joined(self, joined: int) -> bool:
        new = joined & ~self.joined
        self.joined = joined
        if new:
            self._last_joined = self.members[set_bits(new)[-1]]
        return bool(new)

    def _all_joined(self) -> None:
        with self._lock:
            work, self.join_work = self.join_work, None
            self.joined = 0
            self._joined_here = False
            again = sorted((t for t in self.pending.values() if t.order >= 0), key=lambda t: t.order)
            for waiting in again:
                del self.pending[waiting.name]
                if self.news.pop(waiting.name, None) is None:
                    self._ready &= ~(1 << self._table.slots[waiting.name])
            self.unnamed.extendleft(reversed(again))
            self._next_unnamed = 0  # who joined early has counted fewer: all begin anew
            for waiting in self.unnamed:
                self._number(waiting)
        if work is not None:
            work.finish(self._last_joined)

    def _choose_news(self) -> list[tuple[str, Work]]:
        """Return what is told next: what was told longest ago, or never, comes first."""
        most = min(_NEWS_AT_ONCE, self._table.capacity)
        news = list(self.news.items())
        if len(news) > most:
            news = sorted(news, key=lambda item: item[1].told)[:most]
        for _, work in news:
            work.told = self.rounds
        return news

    def _hear_news(self, leader: int) -> Steps:
        """The lowest rank that has news tells what it has; all enter it in their tables."""
        items: list[tuple[str, Description]] = []
        if self.transport.rank == leader:
            with self._lock:
                chosen = self._choose_news()
            items = [(name, work.request.description) for name, work in chosen]
        payload = yield from self.exchange.broadcast_bytes(encode_news(items), leader)
        items = decode_news(payload)
        with self._lock:
            answer = self._answer(items)
        agreed = yield from self._agree(answer, -(-len(items) // 4))
        installed = []
        with self._lock:
            for number, (name, description) in enumerate(items):
                disputed = not agreed >> 2 * number & 1
                slot = self._table.install(
                    name, description, self.rounds, disputed, None if disputed else self._rides(description)
                )
                self._plans.clear()
                if agreed >> 2 * number & 2:
                    installed.append((slot, self._table.entries[slot]))
            self._reclassify()
        # A small table may not hold all that was told: what was pushed out again is news once more.
        now_ready = [slot for slot, entry in installed if self._table.entries[slot] is entry]
        yield from self._run_slots(now_ready)
        return bool(now_ready)
