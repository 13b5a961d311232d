"""The engine of one rank: takes requests in, lets its process sets agree and execute, returns Works.

An object without module-level state: n engines on a loopback world live in one process. It is stepped by
the threads that wait and by its own (``progress``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ringdance.core.collectives import complete_alone
from ringdance.core.exchange import Progress
from ringdance.core.peers import Peers
from ringdance.core.placement import pin, placement
from ringdance.core.progress import ProgressEngine
from ringdance.core.recorder import Profiler, Recorder, without_number
from ringdance.core.reports.summary import RunSummary
from ringdance.core.request import Collective, Description, Request, Work
from ringdance.core.ring import Ring
from ringdance.core.sets import ProcessSets
from ringdance.errors import (
    OUT_OF_DATA,
    ArgumentError,
    CollectiveError,
    EngineError,
    NotInitializedError,
    ProcessSetRemovedError,
    RankLostError,
    ShutDownError,
)
from ringdance.settings import Settings
from ringdance.transport.base import Transport

__all__ = ["Engine"]

_REFUSED = (-2,)


class Engine:
    """One rank's engine.

    Attributes:
        rank, size; local_rank, local_size; cross_rank, cross_size: see ``Placement``.
        hosts: the host name of each rank.
        summary: of the run, for rank 0 to show at its end.
        progress: counters of its exchanges; ``callers``: what threads wait for.
        sets: the process sets; ``members(set_id)`` returns the ranks of one, ``process_sets()`` of all.
        closed: nothing can be submitted any more.
        broken: why the engine failed, or None; ``failed_here``: the failure was found by this rank.
        stopped_first: this rank asked for the stop before it received another's request.
        unclean: after a stop, whether some rank was still waiting for something.
        incomplete: after a stop, the names of this rank's operations that were not complete.
        pause_stall_check: see ``Peers.pause``.
        post_all: sends a note to all other ranks; ``on_monitor`` is called with one of kind "monitor".
        profilers: get a span for each wait of a thread while they run.
        departed: a rank whose program has ended, so that this job cannot be started again; else "".

    Args:
        transport: of the whole job; owned by the engine from here on.
        settings: values of all settings.
        threaded: run an engine thread; if not, there is progress only while a thread of the caller waits.
        report: receives warnings.
        ring: where the recorder writes.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        *,
        threaded: bool = True,
        report: Callable[[str], None] | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.settings, self.transport = settings, transport
        self.rank, self.size = transport.rank, transport.size
        self.hosts = tuple(identity.host for identity in transport.identities)
        self.identity = transport.identities[self.rank]
        place = placement(transport)
        self.local_rank, self.local_size, self.cross_rank, self.cross_size = place
        self.recorder = Recorder(settings.recorder_batches, settings.flight_recorder_dir, ring)
        self.recorder.ring.describe(self.rank, self.size, self.identity.host)
        self.profilers: Sequence[Profiler] = ()
        self.report = report or (lambda text: None)
        self.closed = False
        self.broken: CollectiveError | None = None
        self.failed_here = False
        self.unclean = False
        self.stopped_first = False
        self.departed = ""
        self.incomplete: list[str] = []
        self._stop_reason = ""
        self._stop_work = Work(Request(Description(Collective.BARRIER)), "shutdown", self._wait)
        self._lock = threading.Lock()
        self.summary = RunSummary(self.recorder.words, settings.summary_time, self.size)
        self.progress = Progress(self.recorder)
        self.callers: dict[object, Work] = self.progress.callers
        self.sets = ProcessSets(transport, settings, self.progress, self._lock, self.recorder)
        self.members, self.process_sets = self.sets.members, self.sets.ranks
        self._registered = self.sets.registered
        self._peers = Peers(self)
        self.post_all, self.pause_stall_check = self._peers.post_all, self._peers.pause
        self.on_monitor: Callable[[dict[str, Any]], None] = lambda note: None
        self._last_submitted = self._peers.watch.submitters.last
        self._progress_engine: ProgressEngine | None = None
        if self.size > 1:
            self._progress_engine = ProgressEngine(
                self,
                spin_seconds=settings.spin_microseconds * 1e-6,
                thread_name=f"ringdance engine {self.rank}" if threaded else None,
                on_start=lambda: pin(place, self.identity.host, settings, self.report),
            )

    # -- submitting ----------------------------------------------------------------------------

    def submit(self, request: Request, *, wake: bool = True) -> Work:
        """Take a request in.

        Args:
            request: what to do; its input memory must not change until the Work is done.
            wake: True lets the engine thread start it after at most a cycle time; False waits
                until a thread waits for a Work of the set, or ``flush`` is called.

        Raises:
            ArgumentError: unknown set, or this rank is not in it.
            DuplicateNameError: the name is in flight on this rank.
            CollectiveError: the engine has stopped or failed.
        """
        known = self._registered.get(request.set_id) or self.sets.find(request.set_id)
        if self.closed:
            raise self._closed_error()
        if known.alone:
            work = Work(request, request.name or "", self._wait)
            if self.recorder.read_detail():
                self.recorder.submit(work)
            complete_alone(work, self.rank, self.sets.change_alone)
            if self.recorder.detail:
                self.recorder.alone(work)
            return work
        state = known.state
        if state is None:
            raise ArgumentError(
                f"Rank {self.rank} is not in process set number {request.set_id}, "
                f"whose ranks are {list(known.ranks)}."
            )
        name = request.name
        work = Work(request, name or "", self._wait)
        with self._lock:
            if state.stopped or self.closed:  # since the check above; this Work would never be done
                if self.closed or not request.set_id:
                    raise self._closed_error()
                raise ProcessSetRemovedError(f"Process set number {request.set_id} is being removed.")
            state.add(work, name, wake)
        self._last_submitted[work.thread] = work.submitted
        if self.recorder.detail:
            self.recorder.submit(work)
        engine_thread = self._progress_engine
        if wake and (self.callers or engine_thread is None or engine_thread.asleep):
            self._wake()
        return work

    def refuse(self, request: Request, message: str) -> None:
        """Fail this request's name on the peers, since the call on this rank was wrong.

        For argument errors which only this rank can see; the caller raises ``message`` itself.
        """
        known = self._registered.get(request.set_id)
        if known is None or known.state is None or self.closed:
            return
        description = replace(request.description, detail=_REFUSED)
        stand_in = Request(description, name=request.name, set_id=request.set_id)
        work = Work(stand_in, request.name or "", self._wait)
        work.refusal = message
        with contextlib.suppress(ArgumentError), self._lock:
            known.state.add(work, request.name, True)
        self._wake()

    def flush(self, set_id: int = 0) -> None:
        """Let the engine thread start now what is pending in a set."""
        state = self.sets.find(set_id).state
        if state is not None and state.pending.has_work():
            state.urgent = True
            self._wake()

    def _wake(self) -> None:
        if self._progress_engine is not None:
            self._progress_engine.wake()
        event_count = self.sets.event_count
        if event_count is not None:
            event_count.notify_self()

    def _wait(self, work: Work, timeout: float | None, profilers: Sequence[Profiler] | None = None) -> None:
        for profiler in self.profilers if profilers is None else profilers:
            if profiler.running():
                with profiler.span(f"ringdance WAIT {without_number(work.name)}"):
                    self._wait(work, timeout, ())
                return
        known = self._registered.get(work.request.set_id)
        waiting = self.callers if known is None or known.state is None else known.state.waiting
        callers, progress_engine, me = self.callers, self._progress_engine, object()
        if progress_engine is None:  # a Work from before the fork
            raise self._closed_error()
        try:  # each statement by itself leaves nothing behind when Ctrl-C comes: Note [Interrupts]
            callers[me] = waiting[me] = work
            progress_engine.wait(work, timeout)
        finally:
            try:
                callers.pop(me, None)
            finally:
                waiting.pop(me, None)
            if callers or (progress_engine.asleep and self.sets.next_due() is not None):
                progress_engine.caller_left()

    def add_process_set(self, ranks: Iterable[int]) -> int:
        """Make a set and return its id; all ranks must call it, with the same members.

        Raises:
            ArgumentError: on this rank, a rank is out of range or repeated, or an equal set exists; the
                other ranks get a MismatchError that says so.
            MismatchError: ranks asked for different members, or some have joined.
        """
        return self._change_sets("add", Collective.ADD_SET, lambda: self.sets.check_new(ranks))

    def remove_process_set(self, set_id: int) -> None:
        """Remove a set; all ranks must call it.

        What is pending in the set fails with ProcessSetRemovedError.

        Raises:
            ArgumentError: on this rank, the set is that of all ranks, or unknown; the other ranks get a
                MismatchError that says so.
            MismatchError: ranks named different sets, or some have joined.
        """
        self._change_sets("remove", Collective.REMOVE_SET, lambda: self.sets.check_removal(set_id))

    def _change_sets(self, verb: str, kind: Collective, check: Callable[[], tuple[int, ...]]) -> int:
        request = Request(Description(kind), name=f"process_set.{verb}")
        try:
            request.description = replace(request.description, detail=check())
        except ArgumentError as error:
            self.refuse(request, str(error))
            raise
        return int(self.submit(request, wake=False).wait())

    # -- called by the progress engine ---------------------------------------------------------

    def step(self) -> bool:
        """Do what can be done without waiting; return whether something was achieved."""
        if self.closed:
            return False
        sets, progress = self.sets, self.progress
        before = progress.count
        try:
            for machine in sets.machines:
                if next(machine[1], self) is self:
                    sets.machines = tuple(m for m in sets.machines if m is not machine)
                    progress.count += 1
            if not sets.machines:
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
        return progress.count != before

    def check_peers(self) -> None:
        """Read notes, notice lost peers, check for stalls."""
        if not self.closed:
            try:
                self._peers.check()
            except Exception as error:
                self._fail_by(error)

    def abandon(self, work: Work) -> None:
        """Fail a Work that an interrupt has removed from all collections; the engine is closed."""
        if not work.done():
            work.finish(error=None if work is self._stop_work else self._closed_error())

    def thread_failed(self, error: BaseException) -> None:
        """The engine thread has ended in an error: it would not start asynchronous work any more."""
        self.fail(EngineError.of(self.identity, error))

    # -- the end -------------------------------------------------------------------------------

    def shutdown(
        self,
        reason: str = "has called shutdown()",
        timeout: float = 30.0,
        departing: bool = False,
    ) -> bool:
        """Stop on all ranks; what is pending anywhere fails with ShutDownError.

        Args:
            reason: for the others' messages, after this rank's name.
            timeout: seconds to wait for the others' agreement.
            departing: this rank's program ends, it will not come back.

        Returns:
            Whether all ranks agreed, so that nothing is left in flight.
        """
        if self._progress_engine is None:
            self.closed = True
            return True
        if not self.closed:
            self.stopped_first = not self._stop_reason
            departed = str(self.identity) if departing else ""
            self._peers.post_all({"kind": "stop", "reason": reason, "departed": departed})
            self.stop(f"{self.identity} {reason}")
            self._wake()
        try:
            # After an agreed stop too: the engine thread may still be freeing communicators.
            self._progress_engine.wait(self._stop_work, timeout)
        except TimeoutError:
            missing = self._peers.missing()
            self.fail(
                ShutDownError(f"{self.identity} {reason}, and {missing} did not agree in {timeout:g} s.")
            )
        self._progress_engine.join()
        return self.broken is None and self._stop_work.done()

    def stop(self, reason: str) -> None:
        """Let all sets agree to stop."""
        self._stop_reason = self._stop_reason or reason
        for state, _ in self.sets.machines:
            state.stopping = True

    def _close(self) -> None:
        """Free everything: all sets have agreed to stop."""
        self.closed = True
        self._peers.read_notes()  # in a short job: where the monitor of rank 0's host listens
        self._peers.exchange_figures()
        limit = time.monotonic() + 0.2  # the note with the reason can be slower than the round
        while not self._stop_reason and time.monotonic() < limit:
            self._peers.read_notes()
            time.sleep(1e-3)
        self._stop_reason = self._stop_reason or "Another rank has shut down"
        advice = f" {OUT_OF_DATA}" if self.departed else ""
        error = ShutDownError(f"{self._stop_reason} while this operation was pending.{advice}")
        states = [known.state for _, known in sorted(self._registered.items(), reverse=True)]
        for state in states:
            if state is not None:
                self.unclean |= not state.no_waiter
                self.incomplete += [w.name for w in state.pending.in_flight() if w.refusal is None]
                self.sets.fail_pending(state, error)
        self.sets.event_count = None
        try:
            for state in states:
                if state is not None:
                    state.transport.close(True)
        finally:
            self._stop_work.finish()

    def fail(self, error: CollectiveError, notify: bool = True) -> None:
        """Break the engine: tell the peers, write the flight recorder, fail all pending work."""
        if self.closed:
            return
        self.broken = error
        self.closed = True
        states = self.sets.states()
        pending = [work.name for state in states for work in state.pending.in_flight()]
        message = str(error)
        if notify:
            self.failed_here = True
            kind = type(error).__name__
            self._peers.post_all(
                {"kind": "failed", "message": message, "departed": self.departed, "error": kind}
            )
        path = self.recorder.dump(self.identity, message, pending)
        if path and error.args:
            error.args = (f"{error.args[0]} (Last batches: {path})", *error.args[1:])
        for state in states:
            self.sets.fail_pending(state, error)
        self._stop_work.finish(error=None)

    def leave(self, message: str) -> None:
        """End this rank in an error; the others fail with RankLostError."""
        self.departed = str(self.identity)
        self.fail(RankLostError(message))

    def fail_lost(self, who: str) -> None:
        """Fail because a rank has died."""
        self.departed = who
        self.fail(
            RankLostError(
                f"{who} died while {self.identity} waited for it. Look for its last output, "
                "or for the kernel's out-of-memory killer (dmesg) on its host."
            )
        )

    def _fail_by(self, error: Exception) -> None:
        """Fail because of an error, which may mean that a rank has died."""
        lost = self.transport.lost(error)
        if lost is None:
            self.fail(EngineError.of(self.identity, error))
            return
        self._peers.read_notes()  # what it sent before says more
        if not self.closed:
            self.fail_lost(", ".join(str(self.transport.identities[rank]) for rank in lost) or "A rank")

    def _closed_error(self) -> CollectiveError:
        if self.broken is not None:
            return type(self.broken)(str(self.broken))
        reason = self._stop_reason or "This rank has shut down"
        return ShutDownError(f"{reason}; nothing more can be submitted.")

    def disown(self) -> None:
        """In a forked child: answer rank and size, refuse collectives."""
        if self.size == 1:
            return  # needs no peers
        self.broken = NotInitializedError(
            f"This process (pid {os.getpid()}) was forked from {self.identity} and is not part of the job: "
            "rank() and size() work, collectives only in the rank itself, not in DataLoader workers."
        )
        self.closed = True
        # The engine thread was not forked, and may have held locks.
        self._progress_engine = self.sets.event_count = None
