"""The registry of an engine's process sets. Sets are added and removed when all ranks agree."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ringdance.core.callers import Callers
from ringdance.core.collectives import AgreedRequest
from ringdance.core.exchange import Context, Steps, exchange_for
from ringdance.core.process_sets.agreement import VectorLayout
from ringdance.core.process_sets.state import EngineValues, ProcessSetState
from ringdance.core.request import Collective, Description
from ringdance.core.transport.base import Transport
from ringdance.core.transport.eventcount import EventCount
from ringdance.errors import ArgumentError, CollectiveError, ProcessSetRemovedError
from ringdance.settings import Settings

FIRST_GROUP = 1 << 15  # first id of sets registered only on members; records have 16 bits for set ids
TUNED_CHUNK_BYTES = 2 << 20  # largest chunk that tuning may choose while the job is running
_MIN_BUFFER = 1 << 16  # even for small chunks, leave a few cache lines for each of hundreds of members


_Post = Callable[[int, dict[str, Any]], None]


@dataclass(slots=True)
class RegisteredSet:
    """A process set as registered on this rank, whether the rank is a member or not."""

    ranks: tuple[int, ...]
    state: ProcessSetState | None  # None on ranks that are not members
    alone: bool


def buffer_bytes(settings: Settings, tuned: bool = False) -> int:
    """Return the size in bytes of a rank's buffers in a window, 0 for no window.

    ``tuned``: If True, leave space for the largest chunk that tuning may choose.
    """
    if not settings.window:
        return 0
    most = TUNED_CHUNK_BYTES if tuned and (settings.autotune or settings.tuned) else 0
    return max(settings.chunk_bytes, settings.small_bytes, _MIN_BUFFER, most)


def vector_bytes(size: int, capacity: int) -> int:
    """Return the size in bytes of the longest agreement vector for ``size`` ranks."""
    return VectorLayout(size).width(max(1, capacity))


class ProcessSets:
    """The registered process sets. A set has the same id and members wherever it is registered.

    Args:
        transport: Connects all ranks.
        settings: The engine's settings.
        context: State shared by all sets.
        callers: The engine's callers.
        lock: Guards everything that submitting threads change.

    Attributes:
        registered: All sets by id.
        machines: State machines of this rank's sets, with their generators.
        event_count: Event count that wakes this rank. None unless a window on this host connects all peers.
        on_tune: Takes each rank's measurements (b"" for a rank that has joined), and returns new values for
            the set of all ranks, or None for no change. The attribute is None if tuning is disabled.

    Note [Tuning]
        Settings that determine what is executed, and how, are changed by a request like any other, and thus
        at the same point in the agreed order on all ranks. The request gathers the ranks' measurements. Each
        rank computes the new values with the same code from the same bytes. Only the set of all ranks is
        changed, because the other sets each have their own order. The new values must not depend on anything
        that may differ between ranks, such as their environments. If such a value is needed, rank 0 sends it.

    Note [Groups that are destroyed]
        A rank that leaves a group sends the members a note with the number of requests it has submitted.
        Requests match by their order, so this number identifies the requests that will never be submitted.
        They fail in the next check of the peers, with an error that names the rank. The other requests are
        executed, because the rank continues to take part in the group's rounds until all members have left
        and none has such a request pending. Only then do all members agree to stop and free the group
        together. Until then, a message that was sent to a member can still be received.
    """

    def __init__(
        self, transport: Transport, settings: Settings, context: Context, callers: Callers,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.registered: dict[int, RegisteredSet] = {}
        self.machines: tuple[tuple[ProcessSetState, Steps], ...] = ()
        self.event_count: EventCount | None = None
        self.on_tune: Callable[[list[bytes]], EngineValues | None] | None = None
        self._transport = transport
        self._settings = settings
        self._context, self._callers = context, callers
        context.on_thread = self._on_thread
        self._lock = lock
        self.register(0, tuple(range(transport.size)), transport)
        self._find_event_count()

    def find(self, set_id: int) -> RegisteredSet:
        """Return a process set. Raises ArgumentError if it does not exist."""
        known = self.registered.get(set_id)
        if known is None:
            raise ArgumentError(
                f"Process set {set_id} does not exist. The process sets and their ranks are {self.ranks()}."
            )
        return known

    def ranks(self) -> dict[int, tuple[int, ...]]:
        """Return the global ranks of all registered sets, by id."""
        return {set_id: known.ranks for set_id, known in sorted(self.registered.copy().items())}

    def states(self) -> list[ProcessSetState]:
        """Return the state machines of this rank's sets."""
        return [state for state, _ in self.machines]

    def devices_in_flight(self) -> bool:
        """Return True if an exchange has been enqueued on a device, but is not complete."""
        exchanges = [state.exchange for state in self.states()]
        return any([device.in_flight() for exchange in exchanges for device in exchange.devices.values()])

    def next_due(self) -> float | None:
        """Return when the engine thread will next have work (monotonic), or None if nothing is due."""
        soonest: float | None = None
        for state, _ in self.machines:
            due = state.next_due()
            if due is not None and (soonest is None or due < soonest):
                soonest = due
        return soonest

    def backoff_until(self) -> float:
        """Return the time until which rounds are delayed because the last ones achieved nothing, or 0.0."""
        times = [state.pending.not_before for state, _ in self.machines if not state.in_round]
        return min(filter(None, times), default=0.0)

    def check_new(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of a new set in ascending order. Raises ArgumentError if they are not valid."""
        size = self._transport.size
        try:
            wanted = tuple(sorted(operator.index(rank) for rank in ranks))
        except TypeError:
            raise ArgumentError(f"The ranks of a process set must be integers, but got {ranks!r}.") from None
        if not wanted or wanted[0] < 0 or wanted[-1] >= size or len(set(wanted)) < len(wanted):
            raise ArgumentError(
                "A process set must have at least one rank, no duplicates, and only ranks of this job, but "
                f"got {list(wanted)}. This job has the ranks 0 to {size - 1}."
            )
        for set_id, known in self.registered.copy().items():  # Note [Copies of dictionaries]
            if known.ranks == wanted and set_id < FIRST_GROUP:
                raise ArgumentError(
                    f"A process set with the ranks {list(wanted)} already exists (number {set_id}). "
                    "Use the existing process set instead."
                )
        return wanted

    def check_removal(self, set_id: int) -> tuple[int]:
        """Return a set's id as a tuple. Raises ArgumentError if the set cannot be removed."""
        if set_id == 0:
            raise ArgumentError("Process set 0, which contains all ranks, cannot be removed.")
        self.find(set_id)
        return (set_id,)

    def register(self, set_id: int, ranks: tuple[int, ...], transport: Transport | None) -> None:
        """Register a set. ``transport`` is None on ranks that are not members."""
        state = None
        if transport is not None and len(ranks) > 1:
            s = self._settings
            largest = buffer_bytes(s, tuned=set_id == 0)
            exchange = exchange_for(
                transport, s.chunk_bytes, s.small_bytes, self._context, s.deterministic, largest
            )
            exchange.set_id = set_id
            change = self._change if set_id == 0 else None
            state = ProcessSetState(set_id, transport, exchange, s, self._callers, self._lock, change)
            steps = state.steps() if set_id < FIRST_GROUP else self._steps_of_group(set_id, state)
            self.machines = (*self.machines, (state, steps))
        alone = len(ranks) == 1 and self._transport.rank in ranks
        self.registered[set_id] = RegisteredSet(ranks, state, alone)

    def add_group(self, set_id: int, ranks: tuple[int, ...]) -> None:
        """Register a set on its members only. Blocks until all members have called this."""
        transport = None
        if len(ranks) > 1:
            transport = self._transport.subset(ranks, buffer_bytes(self._settings))
        self.register(set_id, ranks, transport)
        self._find_event_count()

    def leave(self, set_id: int) -> None:
        """Leave a group. Threads: any, even in a signal handler. See Note [Groups that are destroyed]."""
        known = self.registered.get(set_id)
        if known is None or known.state is None:
            self.registered.pop(set_id, None)
        else:
            known.state.urgent = known.state.leaving = True

    def check_left(self, post: _Post) -> None:
        """Send notes about groups that this rank has left, and stop groups that all members have left.

        Called during engine steps.
        """
        own = self._transport.rank
        for state in self.states():
            if state.leaving and own not in state.left:
                self._send_left(state, state.pending.submitted, "", post)
            if len(state.left) == len(state.members) and not state.pending.has_work():
                state.stopping = True

    def give_up(self, set_id: int, number: int, why: str, post: _Post) -> bool:
        """Leave a group, and fail a request in it and all later ones. Returns False if it is not pending.

        Called during engine steps. A message (``number`` -1) is not a request, so it does not make this rank
        give up any submitted request. If a member has submitted the same request but has not read the note
        yet, both may have agreed to execute it. In that case, the engine fails (``Executor.run_unnamed``).
        """
        known = self.registered.get(set_id) if set_id >= FIRST_GROUP else None
        state = known.state if known is not None else None
        if state is None:
            return False
        if number < 0:
            number = state.pending.submitted
        elif number not in [work.order for work in state.pending.unnamed]:
            return False
        state.urgent = state.leaving = True
        self._send_left(state, number, why, post)
        return True

    def _send_left(self, state: ProcessSetState, submitted: int, why: str, post: _Post) -> None:
        note = {"kind": "left", "set": state.set_id, "submitted": submitted, "why": why}
        for rank in state.members:
            if rank != self._transport.rank:
                post(rank, note)
        self.on_left(self._transport.rank, note)

    def on_left(self, rank: int, note: dict[str, Any]) -> None:
        """Fail operations that cannot complete because a rank left a group. Called during engine steps."""
        known = self.registered.get(note["set"])
        if known is None or (state := known.state) is None:
            return
        state.left[rank] = time.monotonic()
        state.why = state.why or note["why"]
        with self._lock:
            late = state.pending.end_at(note["submitted"], state.removal())
        for work in late:
            work.finish(error=ProcessSetRemovedError(f"'{work.name}': {state.removal()}"))

    def _steps_of_group(self, set_id: int, state: ProcessSetState) -> Steps:
        """Run until all members have left, then free the set."""
        yield from state.steps()
        if not state.leaving:  # the set has stopped because the job is ending
            return
        self.fail_pending(state, ProcessSetRemovedError(state.removal()))
        yield from self._on_thread(state.close)
        del self.registered[set_id]
        self._find_event_count()

    def _change(self, item: AgreedRequest) -> Steps:
        """Add or remove a set, or change settings. All ranks make such changes in the same order."""
        detail = item.description.detail
        if item.description.kind == Collective.TUNE:
            return (yield from self._tune(item))
        if item.description.kind == Collective.ADD_SET:
            set_id = self._free_id()
            transport = None
            if len(detail) > 1:
                size = buffer_bytes(self._settings)
                transport = yield from self._on_thread(lambda: self._transport.split(detail, size))
            self.register(set_id, detail, transport)
        else:
            set_id = detail[0]
            state = self.registered[set_id].state
            if state is not None:
                state.stopping = True
                while not state.stopped:
                    yield
                text = f"Process set {set_id} was removed while this operation was pending in it."
                self.fail_pending(state, ProcessSetRemovedError(text))
                yield from self._on_thread(state.close)
            del self.registered[set_id]
        self._find_event_count()
        return [set_id]

    def _tune(self, item: AgreedRequest) -> Steps:
        """Gather the ranks' measurements and change settings accordingly. See Note [Tuning]."""
        state = self.registered[0].state
        assert state is not None
        own = b"" if item.work is None else item.work.request.inputs[0].tobytes()
        measured = yield from state.exchange.gather_bytes(own)
        values = self.on_tune(measured) if self.on_tune is not None else None
        if values is not None:
            state.change(values)
        return [[]]

    def _on_thread(self, call: Callable[[], Any]) -> Steps:
        """Run a call that may block on a separate thread, while other sets are stepped.

        If MPI does not allow other threads, run the call on this one. That is safe, because all ranks make
        such calls in the same order and wait for nothing else.
        """
        if not self._transport.several_threads:
            return call()
        outcome = Future[Any]()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=run, name="ringdance set-up", daemon=True)
        thread.start()
        while not outcome.done():
            yield
        thread.join()
        return outcome.result()

    def change_alone(self, description: Description) -> int:
        """Add or remove a set in a job with one process. Returns its id."""
        if description.kind == Collective.REMOVE_SET:
            del self.registered[description.detail[0]]
            return description.detail[0]
        set_id = self._free_id()
        self.register(set_id, description.detail, None)
        return set_id

    def _free_id(self) -> int:
        return next(i for i in range(1, len(self.registered) + 1) if i not in self.registered)

    def _find_event_count(self) -> None:
        transports = [state.transport for state, _ in self.machines]
        reachable = all(transport.window is not None and transport.one_host for transport in transports)
        self.event_count = self._transport.event_count if reachable else None

    def fail_pending(self, state: ProcessSetState, error: CollectiveError) -> None:
        """Fail all pending requests of a set."""
        with self._lock:
            works = state.pending.drop_all()
        for work in works:
            # One instance per Work, because each raise of a shared instance would extend its traceback.
            own = type(error)(*error.args)
            own.__cause__ = error.__cause__
            work.finish(error=own)
