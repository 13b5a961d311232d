"""The process sets of an engine: registered, made and removed by agreement of all ranks."""

from __future__ import annotations

import abc
import operator
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ringdance.core.exchange import Progress, Steps, exchange_for
from ringdance.core.execute import AgreedRequest
from ringdance.core.process_set import ProcessSetState
from ringdance.core.reports.recorder import Recorder
from ringdance.core.request import Collective, Description, Request, Work
from ringdance.errors import ArgumentError, CollectiveError, ProcessSetRemovedError
from ringdance.settings import Settings
from ringdance.transport.base import Transport

__all__ = ["ProcessSets", "RegisteredSet", "area_bytes"]

_SMALLEST_AREA = 1 << 16  # some cache lines for each of hundreds of members, however small the pieces


@dataclass(slots=True)
class RegisteredSet:
    """A process set as every rank knows it, member or not."""

    ranks: tuple[int, ...]
    state: ProcessSetState | None  # None on ranks that are not members
    alone: bool


def area_bytes(settings: Settings) -> int:
    """Return the data area of each rank in a window; 0 for none."""
    if not settings.window:
        return 0
    return max(settings.window_bytes or settings.chunk_bytes, settings.small_bytes, _SMALLEST_AREA)


class ProcessSets(abc.ABC):
    """The part of the engine that knows the sets. Registered ids and ranks are the same on all ranks."""

    settings: Settings
    transport: Transport
    recorder: Recorder
    rank: int
    size: int

    def __init__(self) -> None:
        self._progress = Progress()
        self._lock = threading.Lock()
        self._sets: dict[int, RegisteredSet] = {}
        self._machines: tuple[tuple[ProcessSetState, Steps], ...] = ()

    @abc.abstractmethod
    def submit(self, request: Request, *, wake: bool = True) -> Work:
        """Take a request in (see ``Engine``)."""

    @abc.abstractmethod
    def refuse(self, request: Request, message: str) -> None:
        """Tell the peers of a wrong call (see ``Engine``)."""

    @abc.abstractmethod
    def _sets_changed(self) -> None:
        """Take notice of sets that have come or gone."""

    def members(self, set_id: int = 0) -> tuple[int, ...]:
        """Return the global ranks of a set, ascending. Raises ArgumentError for an unknown set."""
        return self._known(set_id).ranks

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return all registered sets: id -> ranks."""
        return {set_id: known.ranks for set_id, known in sorted(self._sets.items())}

    def add_process_set(self, ranks: Iterable[int]) -> int:
        """Make a set and return its id. All ranks must call it with the same members; blocks until all have.

        Raises:
            ArgumentError: on this rank, a rank is out of range or repeated, or an equal set exists; the
                other ranks get a MismatchError that says so.
            MismatchError: ranks asked for different members, or some have joined.
        """
        request = Request(Description(Collective.ADD_SET), name="process_set.add")
        try:
            request.description = replace(request.description, detail=self._new_members(ranks))
        except ArgumentError as error:
            self.refuse(request, str(error))
            raise
        return int(self.submit(request, wake=False).wait())

    def _new_members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the sorted members of a set that can be made. Raises ArgumentError."""
        try:
            wanted = tuple(sorted(operator.index(rank) for rank in ranks))
        except TypeError:
            raise ArgumentError(f"A process set needs ranks, which are integers; got {ranks!r}.") from None
        if not wanted or wanted[0] < 0 or wanted[-1] >= self.size or len(set(wanted)) < len(wanted):
            raise ArgumentError(
                f"A process set needs at least one rank, and each only once; got {list(wanted)}, "
                f"and this job has the ranks 0 to {self.size - 1}."
            )
        for set_id, known in self._sets.items():
            if known.ranks == wanted:
                raise ArgumentError(
                    f"A process set with the ranks {list(wanted)} exists already: number {set_id}."
                )
        return wanted

    def remove_process_set(self, set_id: int) -> None:
        """Remove a set. All ranks must call it; what is pending in the set fails with ProcessSetRemovedError.

        Raises:
            ArgumentError: on this rank, the set is that of all ranks, or unknown; the other ranks get a
                MismatchError that says so.
            MismatchError: ranks named different sets, or some have joined.
        """
        request = Request(Description(Collective.REMOVE_SET, detail=(set_id,)), name="process_set.remove")
        try:
            if set_id == 0:
                raise ArgumentError("The process set of all ranks (number 0) cannot be removed.")
            self._known(set_id)
        except ArgumentError as error:
            self.refuse(request, str(error))
            raise
        self.submit(request, wake=False).wait()

    def _known(self, set_id: int) -> RegisteredSet:
        known = self._sets.get(set_id)
        if known is None:
            raise ArgumentError(
                f"There is no process set number {set_id}; registered: {self.process_sets()}."
            )
        return known

    def _register(self, set_id: int, ranks: tuple[int, ...], transport: Transport | None) -> None:
        state = None
        if transport is not None and len(ranks) > 1:
            s = self.settings
            state = ProcessSetState(
                set_id,
                transport,
                exchange_for(transport, s.chunk_bytes, s.small_bytes, self._progress, s.deterministic),
                capacity=s.cache_capacity,
                threshold=s.fusion_threshold,
                cycle_seconds=s.cycle_time * 1e-3,
                lock=self._lock,
                progress=self._progress,
                recorder=self.recorder,
                change_set=self._change_set if set_id == 0 else None,
            )
            self._machines = (*self._machines, (state, state.steps()))
        self._sets[set_id] = RegisteredSet(ranks, state, len(ranks) == 1 and self.rank in ranks)

    def _change_set(self, item: AgreedRequest) -> Steps:
        """Carry out an agreed change of sets; all ranks come here in the same order."""
        assert item.work is not None
        detail = item.description.detail
        if item.description.kind == Collective.ADD_SET:
            set_id = self._free_id()
            transport = None
            if len(detail) > 1:
                transport = yield from self._off_driver(
                    lambda: self.transport.split(detail, area_bytes(self.settings))
                )
            self._register(set_id, detail, transport)
            result: Any = set_id
        else:
            set_id = detail[0]
            state = self._sets[set_id].state
            if state is not None:
                state.stopping = True
                while not state.stopped:
                    yield
                self._fail_pending(
                    state,
                    ProcessSetRemovedError(
                        f"Process set number {set_id} was removed while this operation was pending in it."
                    ),
                )
                yield from self._off_driver(lambda: state.transport.close(True))
            del self._sets[set_id]
            result = set_id
        self._sets_changed()
        return [result]

    def _off_driver(self, call: Callable[[], Any]) -> Steps:
        """Run a call that may block on a thread of its own, so that other sets are stepped meanwhile.

        On this thread where MPI allows no other: all ranks come here in one order and wait for nothing else.
        """
        if not self.transport.several_threads:
            return call()
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=run, name="ringdance set-up", daemon=True)
        thread.start()
        while not outcome:
            yield
        thread.join()
        if outcome[0][1] is not None:
            raise outcome[0][1]
        return outcome[0][0]

    def _change_alone(self, description: Description) -> int:
        """Change the sets of a job of one process: nobody to agree with."""
        if description.kind == Collective.REMOVE_SET:
            del self._sets[description.detail[0]]
            return description.detail[0]
        set_id = self._free_id()
        self._register(set_id, description.detail, None)
        return set_id

    def _free_id(self) -> int:
        return next(i for i in range(1, len(self._sets) + 1) if i not in self._sets)

    def _fail_pending(self, state: ProcessSetState, error: CollectiveError) -> None:
        with self._lock:
            works = state.drop_all()
        for work in works:
            # An instance for each: raising one object again and again would make its traceback ever longer.
            own = type(error)(*error.args)
            own.__cause__ = error.__cause__
            work.finish(error=own)
