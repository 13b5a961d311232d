"""The engine of one rank. It accepts requests, which its process sets agree on and execute.

The engine has no module-level state, so the n engines of a loopback world can run in one process. Waiting
threads and the engine's own thread step it (see ``progress``). For how it ends, see Note [Ends] in ``ends``.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ringdance.core.callers import Callers
from ringdance.core.collectives import complete_alone
from ringdance.core.ends import EngineEnd
from ringdance.core.exchange import Context
from ringdance.core.labels import label_of
from ringdance.core.peers import Note, Peers
from ringdance.core.process_sets.registry import FIRST_GROUP, ProcessSets
from ringdance.core.progress import ProgressEngine
from ringdance.core.recorder import Profiler, Recorder
from ringdance.core.reports.summary import RunSummary
from ringdance.core.request import Collective, Description, Request, Work
from ringdance.core.ring import Ring
from ringdance.core.stepping import Stepper
from ringdance.core.transport.base import Transport
from ringdance.errors import ArgumentError, ProcessSetRemovedError, RankLostError, ShutDownError, StallError
from ringdance.settings import Settings

_REFUSED = (-2,)


class Engine:
    """One rank's engine.

    Attributes:
        rank, size: This rank and the number of ranks in the whole job.
        local_rank, local_size: This rank's index among the ranks on its host, and the number of these ranks.
        cross_rank, cross_size: This rank's index among the ranks with the same local rank, one per host, and
            the number of these ranks.
        hosts: Host name of each rank.
        summary: Summary of the run. Rank 0 shows it at the end.
        context: State that the engine's exchanges share.
        callers: The threads that have submitted requests, and what they are waiting for.
        sets: The process sets.
        end: Whether and how the engine has ended.
        on_monitor: Called with each note of kind "monitor".
        on_check: Called a few times per second.
        on_step: Called at the end of each step. None while nothing is being tuned.
        profilers: The frameworks' profilers. While one of them is running, it records a span for each wait.

    Args:
        transport: Connects all ranks. The engine takes ownership of it.
        settings: The settings.
        threaded: If True, run an engine thread. Otherwise the engine advances only while a thread waits.
        report: Called with each warning.
        ring: Memory for the recorder's records.
    """

    def __init__(
        self, transport: Transport, settings: Settings, *, threaded: bool = True,
        report: Callable[[str], None] | None = None, ring: Ring | None = None,
    ) -> None:
        self.settings, self.transport = settings, transport
        self.rank, self.size = transport.rank, transport.size
        self.hosts = tuple(identity.host for identity in transport.identities)
        self.identity = transport.identities[self.rank]
        self.local_pids = [peer.pid for peer in transport.identities if peer.host == self.identity.host]
        self.local_rank = transport.host_group.index(self.rank)
        self.local_size = len(transport.host_group)
        cross = _across_hosts(self.hosts, self.rank, self.local_rank)
        self.cross_rank, self.cross_size = cross.index(self.rank), len(cross)
        self.recorder = Recorder(settings.flight_recorder_dir, ring)
        self.recorder.ring.describe(self.rank, self.size, self.identity.host)
        self.profilers: list[Profiler] = []
        self.report = report or (lambda text: None)
        self.joins = 0  # number of times that all ranks have joined
        self._stop_work = Work(Request(Description(Collective.BARRIER)), "shutdown", self._wait)
        self._lock = threading.RLock()  # reentrant: a signal handler may submit while its thread holds it
        self.summary = RunSummary(self.recorder.words, settings.summary_time, self.size)
        self.context = Context(self.recorder)
        self.callers = Callers()
        self.sets = ProcessSets(transport, settings, self.context, self.callers, self._lock)
        self.on_monitor: Callable[[Note], None] = lambda note: None
        self.on_check: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] | None = None
        peers = self._peers = Peers(transport, settings, self.sets, self.callers, self.recorder)
        peers.handlers["monitor"] = lambda rank, note: self.on_monitor(note)
        self.end = EngineEnd(transport, self.sets, peers, self.recorder, self.summary, self._stop_work)
        self._stepper = Stepper(
            self.sets, self.context, self.callers, peers, self.end, lambda: self.on_check(), self.report
        )
        self._progress_engine: ProgressEngine | None = None
        if self.size > 1:
            self._progress_engine = ProgressEngine(self._stepper, settings.spin_microseconds * 1e-6)
            if threaded:
                self._progress_engine.start_thread(f"ringdance engine {self.rank}")

    @property
    def closed(self) -> bool:
        """True once the engine no longer accepts requests."""
        return self.end.closed

    def members(self, set_id: int = 0) -> tuple[int, ...]:
        """Return the global ranks of a set, in ascending order. Raises ArgumentError for an unknown set."""
        return self.sets.find(set_id).ranks

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return the global ranks of all registered sets, by id."""
        return self.sets.ranks()

    # -- submitting ----------------------------------------------------------------------------

    def submit(self, request: Request, *, wake: bool = True) -> Work:
        """Submit a request.

        Args:
            request: The operation. Its input memory must not change until the Work is done.
            wake: If True, the engine thread starts the request within about one cycle time. Otherwise the
                request starts when a thread waits for a Work in the set, or when ``flush`` is called.

        Raises:
            ArgumentError: The set is unknown, or this rank is not a member.
            DuplicateNameError: A request with this name is already in flight on this rank.
            CollectiveError: The engine has stopped or failed.
        """
        known = self.sets.registered.get(request.set_id) or self.sets.find(request.set_id)
        if self.end.closed:
            raise self.end.error()
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
                f"Rank {self.rank} is not a member of process set {request.set_id}, "
                f"whose members are the ranks {list(known.ranks)}."
            )
        name = request.name
        work = Work(request, name or "", self._wait)
        with self._lock:
            if state.stopped or self.end.closed:  # check again under the lock, or this Work may hang
                if self.end.closed or not request.set_id:
                    raise self.end.error()
                raise ProcessSetRemovedError(
                    f"Process set {request.set_id} is being removed and accepts no more requests."
                )
            state.pending.add(work, name, wake)
        self.callers.submitted = work.submitted
        if self.recorder.detail:
            self.recorder.submit(work)
        engine_thread = self._progress_engine
        if wake and (self.callers.waiting or engine_thread is None or engine_thread.asleep):
            self._wake()
        return work

    def refuse(self, request: Request, message: str) -> None:
        """Make requests with this name fail on the peers, because this rank's call was invalid.

        Used for argument errors that only this rank can detect. The caller raises the error with ``message``.
        """
        known = self.sets.registered.get(request.set_id)
        if known is None or known.state is None or self.end.closed:
            return
        description = replace(request.description, detail=_REFUSED)
        stand_in = Request(description, name=request.name, set_id=request.set_id)
        work = Work(stand_in, request.name or "", self._wait)
        work.refusal = message
        with contextlib.suppress(ArgumentError, ProcessSetRemovedError), self._lock:
            known.state.pending.add(work, request.name, True)
        self._wake()

    def flush(self, set_id: int = 0) -> None:
        """Tell the engine thread to start the set's pending requests now."""
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
                with profiler.span(f"ringdance WAIT {label_of(work.name)}"):
                    self._wait(work, timeout, ())
                return
        waiting, progress_engine, me = self.callers.waiting, self._progress_engine, object()
        if progress_engine is None:  # the Work was submitted before this process was forked
            raise self.end.error()
        try:  # Ctrl-C between any two of these statements is safe, see Note [Interrupts]
            waiting[me] = work
            progress_engine.wait(work, timeout)
        finally:
            waiting.pop(me, None)
            if waiting or (progress_engine.asleep and self.sets.next_due() is not None):
                progress_engine.caller_left()

    def add_process_set(self, ranks: Iterable[int]) -> int:
        """Make a process set and return its id. All ranks must call this with the same members.

        Raises:
            ArgumentError: A member is out of range or repeated, or a set with these members already exists.
                Raised on ranks where the call is invalid. The other ranks get a MismatchError with the same
                text.
            MismatchError: The ranks passed different members, or some ranks have joined.
        """
        return self._change_sets("add", Collective.ADD_SET, lambda: self.sets.check_new(ranks))

    def remove_process_set(self, set_id: int) -> None:
        """Remove a process set. All ranks must call this.

        Pending operations of the set fail with ProcessSetRemovedError.

        Raises:
            ArgumentError: The set is unknown, or is the set of all ranks. Raised on ranks where the call is
                invalid. The other ranks get a MismatchError with the same text.
            MismatchError: The ranks passed different sets, or some ranks have joined.
        """
        self._change_sets("remove", Collective.REMOVE_SET, lambda: self.sets.check_removal(set_id))

    def add_group(self, number: int, ranks: tuple[int, ...]) -> int:
        """Make a set without involving non-members, and return its id. All members must call this together.

        Args:
            number: A number below ``FIRST_GROUP``, the same on all members and not in any member's
                ``group_numbers``.
            ranks: Members, in ascending order.

        Raises:
            CollectiveError: The engine has stopped or failed.
        """
        set_id = FIRST_GROUP + number
        if self._progress_engine is None:
            self.sets.add_group(set_id, ranks)
            return set_id
        while not self._exclusively(self.sets.add_group, set_id, ranks):  # peers wait, so retry
            if self.end.closed:
                raise self.end.error()
        return set_id

    def await_devices(self, seconds: float = math.inf) -> None:
        """Wait until all exchanges enqueued on devices are complete, or the engine has failed.

        Raises:
            RankLostError: They are not complete after ``seconds``.
        """
        until = time.monotonic() + seconds
        while self.end.broken is None and self.sets.devices_in_flight():
            if time.monotonic() > until:
                raise RankLostError(
                    f"Exchanges on the device of {self.identity} are not complete after {seconds:g} s. Look "
                    "for ranks that have ended early, or have skipped a call."
                )
            time.sleep(1e-3)

    def group_numbers(self) -> list[int]:
        """Return the numbers of the sets that this rank has made with ``add_group``."""
        return [set_id - FIRST_GROUP for set_id in self.sets.ranks() if set_id >= FIRST_GROUP]

    def leave_group(self, set_id: int) -> None:
        """Free a set made by ``add_group`` once all its members have called this. Does not wait for them."""
        self.sets.leave(set_id)
        self._wake()

    def _change_sets(self, verb: str, kind: Collective, check: Callable[[], tuple[int, ...]]) -> int:
        request = Request(Description(kind), name=f"process_set.{verb}")
        try:
            request.description = replace(request.description, detail=check())
        except ArgumentError as error:
            self.refuse(request, str(error))
            raise
        return int(self.submit(request, wake=False).wait())

    # -- from any thread -----------------------------------------------------------------------

    def _exclusively(self, call: Callable[..., object], *arguments: Any, end: bool = False) -> bool:
        return self._progress_engine is not None and self._stepper.exclusively(call, *arguments, end=end)

    def post_all(self, note: Note) -> None:
        """Send a note to all other ranks. Ranks that cannot be reached are skipped."""
        self._exclusively(self._peers.post_all, note)

    @contextlib.contextmanager
    def pause_stall_check(self, what: str, seconds: float) -> Iterator[None]:
        """Suppress stall reports on all ranks while this rank runs ``what``, for at most ``seconds``."""
        outer: list[tuple[str, float]] = []
        self._exclusively(lambda: outer.append(self._peers.pause(what, seconds)))
        try:
            yield
        finally:
            for name, until in outer:
                end = self._peers.pause, name, max(0.0, until - time.monotonic())
                while not self._exclusively(*end) and not self.end.closed:
                    pass  # retry, because otherwise stalls would not be reported until the pause times out

    def leave(self, message: str) -> None:
        """Stop this rank because of an error. The other ranks fail with RankLostError."""
        error, who = RankLostError(message), str(self.identity)
        self._exclusively(lambda: self.end.fail(error, departed=who), end=True)

    def give_up(self, set_id: int, number: int, message: str) -> None:
        """Fail a request that this rank has stopped waiting for, and all later requests, on all ranks.

        If the request is pending in a group made by ``add_group``, only the group fails, with
        ProcessSetRemovedError. Otherwise the engine fails with StallError, because a request that is being
        executed cannot be canceled.

        Args:
            set_id: The process set.
            number: The request's ``order``, or -1 for a message between two ranks.
            message: Text of the error.
        """

        def fail() -> None:
            if not self.sets.give_up(set_id, number, message, self._peers.post):
                more = ". The operation was already being executed, so the job has failed" if set_id else ""
                self.end.fail(StallError(message + more))

        self._exclusively(fail, end=True)

    def shutdown(
        self, reason: str = "has called shutdown()", timeout: float = 30.0, departing: bool = False
    ) -> bool:
        """Stop the engines of all ranks. Pending operations fail everywhere with ShutDownError.

        Args:
            reason: Text that follows this rank's name in the other ranks' messages.
            timeout: Seconds to wait for the other ranks to agree.
            departing: True if this rank's program is exiting, so that the job cannot be restarted.

        Returns:
            True if all ranks agreed to stop, so that no operation is left in flight.
        """
        if self._progress_engine is None:
            self.end.closed = True
            return True
        if not self.end.closed:
            self._exclusively(self.end.ask_to_stop, reason, departing, end=True)
            self._wake()
        try:
            # Wait even after an agreed stop: the engine thread may still be freeing communicators.
            self._progress_engine.wait(self._stop_work, timeout)
        except TimeoutError:
            missing = self._peers.missing()
            text = f"{self.identity} {reason}, but {missing} did not agree within {timeout:g} s."
            self._exclusively(self.end.fail, ShutDownError(text), end=True)
        self._progress_engine.join()
        return self.end.broken is None and self._stop_work.done()

    def disown(self, origin: str = "was forked from") -> None:
        """Refuse collectives in a child process of a rank. The rank and size remain available.

        The parent's records are not changed.
        """
        self.recorder = Recorder(self.settings.flight_recorder_dir)
        self.summary = RunSummary(self.recorder.words, 0.0, self.size)
        if self.size == 1:
            return  # without peers, collectives also work in a child process
        self.end.disown(origin)
        # The fork did not copy the engine thread, which may have held locks.
        self._progress_engine = self.sets.event_count = None


def _across_hosts(hosts: Sequence[str], rank: int, local_rank: int) -> list[int]:
    """Return each host's rank with this local rank, if any. On the host of ``rank``, return ``rank``."""
    return [i for i, host in enumerate(hosts) if i == rank or hosts[:i].count(host) == local_rank]
