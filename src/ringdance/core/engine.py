"""The engine of one rank: takes requests in, lets its process sets agree and execute, returns Works.

An object without module-level state: n engines on a loopback world live in one process.
It is driven by the threads that wait and by its own (``driver``).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

from ringdance.core.agreement import VectorLayout
from ringdance.core.execute import execute_alone
from ringdance.core.process_set import ProcessSetState
from ringdance.core.progress import Driver
from ringdance.core.reports.stalls import StallWatch
from ringdance.core.request import Collective, Request, Work
from ringdance.core.sets import area_bytes
from ringdance.core.shutdown import EngineEnd
from ringdance.errors import (
    ArgumentError,
    CollectiveError,
    DeadlockError,
    EngineError,
    ProcessSetRemovedError,
    RankLostError,
    StallError,
)
from ringdance.settings import Settings
from ringdance.transport.base import Transport
from ringdance.transport.eventcount import Doorbell

__all__ = ["Engine", "area_bytes", "vector_bytes"]

_REFUSED = (-2,)


def vector_bytes(size: int, capacity: int) -> int:
    """Return the room that agreement vectors of ``size`` ranks need in a window."""
    return VectorLayout(size).width(max(1, capacity))


class Engine(EngineEnd):
    """One rank's engine.

    Attributes:
        rank, size: in the whole job. local_rank, local_size: on this host. cross_rank,
            cross_size: among the ranks with this local rank on all hosts.
        hosts: the host name of each rank.
        settings: as given.
        broken: why the engine failed, or None.
        failed_here: this rank has told the others why the job fails.
        unclean: after a stop, whether some rank was still waiting for something.
        stopped_first: whether this rank asked for the stop before it heard of another's.
        incomplete: after a stop, the names of this rank's operations that were not complete.
        departed: a rank whose program has ended, so that this job cannot be started again; else "".

    Args:
        transport: of the whole job; owned by the engine from here on.
        settings: values of all settings.
        threaded: whether the transport may be used from several threads; without, nothing
            happens but while a thread of the caller waits.
        report: takes a sentence for people (stall warnings).
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        *,
        threaded: bool = True,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(transport, settings)
        self._set_local_places()
        self._report = report or (lambda text: None)
        self._watch = StallWatch(transport, settings, self.process_sets)
        self._register(0, tuple(range(self.size)), transport)
        self._bell = self._find_bell()
        if self.size > 1:
            name = f"ringdance engine {self.rank}"
            self._driver = Driver(
                self, settings.spin_microseconds * 1e-6, self._doorbell, name, threaded, self._pin
            )

    def _set_local_places(self) -> None:
        own = self.hosts[self.rank]
        group = self.transport.host_group
        self.local_rank, self.local_size = group.index(self.rank), len(group)
        seen: dict[str, int] = {}
        crossing = []
        for rank, host in enumerate(self.hosts):
            if seen.setdefault(host, 0) == self.local_rank or (host == own and rank == self.rank):
                crossing.append(rank)
            seen[host] += 1
        self.cross_rank, self.cross_size = crossing.index(self.rank), len(crossing)

    def _pin(self) -> None:
        cores = self.settings.thread_affinity
        if not cores or not hasattr(os, "sched_setaffinity"):
            return
        origin = self.settings.origin("thread_affinity")
        if len(cores) < self.local_size:
            if self.local_rank == 0:
                self._report(
                    f"thread_affinity ({origin}) is ignored: it names {len(cores)} cores for the "
                    f"{self.local_size} ranks of {self.identity.host}"
                )
            return
        try:
            os.sched_setaffinity(0, {cores[self.local_rank]})
        except OSError as error:
            self._report(f"{self.identity}: core {cores[self.local_rank]} ({origin}): {error.strerror}")

    # -- submitting ----------------------------------------------------------------------------

    def submit(self, request: Request, *, wake: bool = True) -> Work:
        """Take a request in.

        Args:
            request: what to do; its input memory must not change until the work is done.
            wake: True lets the engine thread start it after at most a cycle time; False waits
                until a thread waits for a Work of the set, or ``flush`` is called.

        Raises:
            ArgumentError: unknown set, or this rank is not in it.
            DuplicateNameError: the name is in flight on this rank.
            CollectiveError: the engine has stopped or failed.
        """
        known = self._sets.get(request.set_id) or self._known(request.set_id)
        if self.closed:
            raise self._closed_error()
        if known.alone:
            return self._submit_alone(request)
        state = known.state
        if state is None:
            raise ArgumentError(
                f"Rank {self.rank} is not in process set number {request.set_id}, "
                f"whose ranks are {list(known.ranks)}."
            )
        name = request.name
        work = Work(request, name or "", self._wait)
        with self._lock:
            if state.stopped or self.closed:  # since the look above; nobody would finish this work
                raise self._gone_error(request.set_id)
            state.add(work, name, wake)
        self._watch.submitters.last[work.thread] = work.submitted
        if wake and (self._progress.callers or self._driver is None or self._driver.asleep):
            self._nudge()
        return work

    def submitted_since(self, when: float) -> bool:
        """Return whether the calling thread has submitted something since then (``time.monotonic()``)."""
        return self._watch.submitters.last.get(get_ident(), 0.0) >= when

    def _gone_error(self, set_id: int) -> CollectiveError:
        if self.closed or set_id == 0:
            return self._closed_error()
        return ProcessSetRemovedError(f"Process set number {set_id} is being removed.")

    def refuse(self, request: Request, message: str) -> None:
        """Tell the peers that wait for this request's name that the call on this rank was wrong.

        For argument errors which only this rank can see; the caller raises ``message`` itself.
        """
        known = self._sets.get(request.set_id)
        if known is None or known.state is None or self.closed:
            return
        stand_in = Request(
            replace(request.description, detail=_REFUSED), name=request.name, set_id=request.set_id
        )
        work = Work(stand_in, request.name or "", self._wait)
        work.refusal = message
        with contextlib.suppress(ArgumentError), self._lock:
            known.state.add(work, request.name, True)
        self._nudge()

    def flush(self, set_id: int = 0) -> None:
        """Let the engine thread start now what is pending in a set."""
        state = self._known(set_id).state
        if state is not None and state.has_work():
            state.urgent = True
            self._nudge()

    def _nudge(self) -> None:
        if self._driver is not None:
            self._driver.wake()
        bell = self._bell
        if bell is not None:
            bell.ring_self()

    def _submit_alone(self, request: Request) -> Work:
        """Execute a request of a set with one member: at once, on the caller's thread."""
        work = Work(request, request.name or "", self._wait)
        kind = request.description.kind
        if kind == Collective.JOIN:
            work.finish(self.rank)
        elif kind in (Collective.ADD_SET, Collective.REMOVE_SET):
            work.finish(self._change_alone(request.description))
        else:
            try:
                work.finish(execute_alone(request, work))
            except CollectiveError as error:
                work.finish(error=error)
        return work

    def _wait(self, work: Work, timeout: float | None) -> None:
        known = self._sets.get(work.request.set_id)
        waiting = self._progress.callers if known is None or known.state is None else known.state.waiting
        callers, driver, me = self._progress.callers, self._driver, object()
        if driver is None:  # a Work from before the fork
            raise self._closed_error()
        try:  # each statement by itself leaves nothing behind when Ctrl-C comes: Note [Interrupts]
            callers[me] = waiting[me] = work
            driver.wait(work, timeout)
        finally:
            try:
                callers.pop(me, None)
            finally:
                waiting.pop(me, None)
            if callers or driver.asleep:
                driver.caller_left()

    # -- driven --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what can be done without waiting; return whether something was achieved."""
        if self.closed:
            return False
        before = self._progress.count
        try:
            for machine in self._machines:
                if next(machine[1], self) is self:
                    self._machines = tuple(m for m in self._machines if m is not machine)
                    self._progress.count += 1
            if not self._machines:
                self._close()
        except CollectiveError as error:
            self.fail(error)
        except Exception as error:
            self._fail_by(error)
        except BaseException as error:
            self.fail(
                EngineError(f"{self.identity} was interrupted ({type(error).__name__}) during an exchange.")
            )
            raise
        return self._progress.count != before

    @property
    def callers(self) -> dict[object, Work]:
        """What threads wait for."""
        return self._progress.callers

    @property
    def flying(self) -> int:
        """Exchanges that wait for data on its way between hosts."""
        return self._progress.flying

    def next_due(self) -> float | None:
        """Return when the engine thread has something to do: a monotonic time, or None."""
        if self.closed:
            return None
        soonest: float | None = None
        for state, _ in self._machines:
            due = 0.0 if state.in_round or state.stopping else state.next_due()
            if due is not None and (soonest is None or due < soonest):
                soonest = due
        return soonest

    def pausing_until(self) -> float:
        """Return until when rounds are put off after one that achieved nothing; 0.0 for not."""
        times = [state.not_before for state, _ in self._machines if not state.in_round and state.not_before]
        return min(times) if times else 0.0

    def _doorbell(self) -> Doorbell | None:
        return self._bell

    def _find_bell(self) -> Doorbell | None:
        """Return the doorbell if everything this rank can wait for rings it."""
        if all(
            state.transport.window is not None and state.transport.one_host for state, _ in self._machines
        ):
            return self.transport.doorbell
        return None

    def _sets_changed(self) -> None:
        self._bell = self._find_bell()

    def look(self) -> None:
        """Take in notes, notice lost peers, look for stalls."""
        if self.closed:
            return
        try:
            self._look()
        except Exception as error:
            self._fail_by(error)

    def _look(self) -> None:
        self._read_notes()
        if self.closed:
            return
        states = [state for state, _ in self._machines]
        for state in states:
            window = state.transport.window
            if state.in_round and window is not None:
                for place in window.missing():
                    self._check_living(state, state.transport.host_group[place])
        text, error = self._watch.check(states)
        if text is not None:
            self.recorder.add("stall", text)
            if error is not None:
                self.fail(error(text))
            else:
                self._report(text)

    def _check_living(self, state: ProcessSetState, place: int) -> None:
        if not self.closed and state.transport.state(place) == "gone":
            self._read_notes()  # what it has sent before it went says more
        if not self.closed and state.transport.state(place) == "gone":
            self._fail_for(str(state.transport.identities[place]))

    def _hear(self, sender: int, note: dict[str, Any]) -> None:
        kind = note["kind"]
        if kind == "ask":
            status = self._watch.status([state for state, _ in self._machines])
            self.transport.post(sender, json.dumps(status).encode())
        elif kind == "status":
            self._watch.hear(sender, note)
        elif kind == "stop":
            self.departed = self.departed or note["departed"]
            self._stop(f"{self.transport.identities[sender]} {note['reason']}")
        elif kind == "failed" and not self.closed:
            self.departed = self.departed or note["departed"]
            kinds = {"StallError": StallError, "DeadlockError": DeadlockError}
            self.fail(kinds.get(note["error"], RankLostError)(note["message"]), tell=False)
