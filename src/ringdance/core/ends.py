"""How a rank's engine ends: by agreement or with an error.

Note [Ends]
    An engine ends only once. All methods in this table except ``disown`` run while no other thread is
    stepping the engine: they are called in a step, or by ``Stepper.exclusively``. Therefore, only one thread
    at a time sends notes, fails pending work and frees communicators.

    ==================  ==========================================  ========================================
    method              called by                                   what follows
    ==================  ==========================================  ========================================
    ask_to_stop         Engine.shutdown, on a user thread           a note "stop" to the peers; ``stop``
    stop                ask_to_stop; a peer's note "stop"           rounds in which the sets agree to stop
    close               a step, when all sets have agreed           pending work fails with ShutDownError,
                                                                    communicators are freed
    fail                a step or a check of the peers that raised  a note "failed" to the peers; the flight
                        an error; a peer's note "failed";           record; pending work fails;
                        fail_by and fail_lost;                      communicators stay; the transport keeps
                        Engine.shutdown, after its timeout;         the buffers of posted operations
                        Engine.leave, after an uncaught exception;
                        ProgressEngine, if its own thread fails
    fail_by             a step or a check of the peers that raised  ``fail``, or ``fail_lost`` if a rank died
    fail_lost           a check of the peers; fail_by               ``fail`` with RankLostError
    disown              a child of the rank, forked or started      collectives raise in the child; nothing
                                                                    is sent, and the parent's job continues
    ==================  ==========================================  ========================================
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from ringdance.core.peers import Note, Peers
from ringdance.core.process_sets.registry import ProcessSets
from ringdance.core.recorder import Recorder
from ringdance.core.reports.summary import RunSummary
from ringdance.core.request import Work
from ringdance.core.transport.base import Transport
from ringdance.errors import (
    UNEVEN_STEPS,
    CollectiveError,
    DeadlockError,
    EngineError,
    NotInitializedError,
    RankLostError,
    ShutDownError,
    StallError,
)

_OF_NOTES = {"StallError": StallError, "DeadlockError": DeadlockError}  # any other name means RankLostError
_FIGURES_S = 1.0  # how long rank 0 waits for the other ranks' figures; all ranks send theirs at the same time
_REASON_S = 0.2  # how long to wait for the note that says why another rank stopped


@dataclass(eq=False)
class EngineEnd:
    """Whether and how an engine has ended. See Note [Ends].

    Attributes:
        transport: Connects all ranks.
        sets: The process sets.
        peers: The other ranks.
        recorder: Writes the flight record.
        summary: Collects the figures from all ranks.
        stop_work: A ``Work`` that is done once the engine has stopped.
        closed: True once the engine no longer accepts requests.
        broken: Error that made the engine fail, or None.
        failed_here: True if this rank detected the failure.
        stopped_first: True if this rank asked to stop before it received another rank's request.
        unclean: True if a thread of any rank was still waiting for an operation when the engines stopped.
        incomplete: Names of this rank's operations that were not complete when the engine stopped.
        lost_results: True if exchanges on a device failed after their requests were done, and no caller has
            received the error yet.
        departed: Name, host and process id of a rank whose program has exited, so that the job cannot be
            restarted. "" if no program has exited.
    """

    transport: Transport
    sets: ProcessSets
    peers: Peers
    recorder: Recorder
    summary: RunSummary
    stop_work: Work
    closed: bool = False
    broken: CollectiveError | None = None
    failed_here: bool = False
    stopped_first: bool = False
    unclean: bool = False
    incomplete: list[str] = field(default_factory=list)
    lost_results: bool = False
    departed: str = ""
    _reason: str = ""

    def __post_init__(self) -> None:
        self._identity = self.transport.identities[self.transport.rank]
        own_notes = {"stop": self._on_stop, "failed": self._on_failed, "figures": self.summary.on_note}
        self.peers.handlers.update(own_notes)

    def ask_to_stop(self, reason: str, departing: bool) -> None:
        """Ask all ranks to stop. See ``Engine.shutdown``."""
        if self.closed:  # the engine was closed while this thread waited for another thread's step
            return
        self.stopped_first = not self._reason
        departed = str(self._identity) if departing else ""
        self.peers.post_all({"kind": "stop", "reason": reason, "departed": departed})
        self.stop(f"{self._identity} {reason}")

    def _on_stop(self, rank: int, note: Note) -> None:
        """Handle a note of kind "stop" from a peer."""
        self.departed = self.departed or note["departed"]
        self.stop(f"{self.transport.identities[rank]} {note['reason']}")

    def stop(self, reason: str) -> None:
        """Request that all process sets agree to stop."""
        self._reason = self._reason or reason
        for state in self.sets.states():
            state.stopping = True

    def close(self) -> None:
        """Fail pending work and free all communicators, after all sets have agreed to stop."""
        self.closed = True
        self.peers.read_notes()  # in a short job, the note from rank 0's monitor may still be unread
        self._exchange_figures()
        limit = time.monotonic() + _REASON_S
        while not self._reason and time.monotonic() < limit:
            self.peers.read_notes()
            time.sleep(1e-3)
        self._reason = self._reason or "Another rank has shut down"
        made = f"Rank {self._identity.rank} has made {self.recorder.steps_text()}."
        advice = f" {made} {UNEVEN_STEPS}" if self.departed else ""
        error = ShutDownError(f"{self._reason} while this operation was pending.{advice}")
        registered = sorted(self.sets.registered.copy().items(), reverse=True)
        states = [known.state for _, known in registered if known.state is not None]
        for state in states:
            self.unclean |= not state.no_waiter
            self.incomplete += [w.name for w in state.pending.in_flight() if w.refusal is None]
            self.sets.fail_pending(state, error)
        self.sets.event_count = None
        try:
            for state in states:
                state.close()
        finally:
            self.stop_work.finish()

    def _exchange_figures(self) -> None:
        """Send this rank's figures for the summary to rank 0, which waits briefly for all ranks' figures."""
        summary, limit = self.summary, time.monotonic() + _FIGURES_S
        self.recorder.publish()
        if self._identity.rank:
            if summary.wanted(0.5):  # a lower threshold, because rank 0 decides by its own clock
                self.peers.post(0, {"kind": "figures", "figures": summary.figures()})
            return
        while summary.wanted() and not summary.complete and time.monotonic() < limit:
            self.peers.read_notes()
            time.sleep(1e-3)

    def fail(self, error: CollectiveError, *, departed: str = "", notify: bool = True) -> None:
        """Notify the peers, write the flight record and fail all pending work.

        Args:
            error: Reason for the failure.
            departed: The rank whose program has exited, or "" if no program has exited.
            notify: Send the error to the peers. Pass False if a peer already reported it.
        """
        if self.closed:
            return
        states = self.sets.states()
        pending = [work.name for state in states for work in state.pending.in_flight()]
        self.lost_results = not pending and self.sets.devices_in_flight()  # before other threads see the end
        self.broken, self.closed, self.failed_here = error, True, notify
        self.departed = self.departed or departed
        message = str(error)
        if notify:
            kind = type(error).__name__
            note = {"kind": "failed", "message": message, "departed": self.departed, "error": kind}
            self.peers.post_all(note)
        # Only the rank that detected the failure shows this error, unless its own exception was the cause.
        named = notify and departed != str(self._identity)
        path = self.recorder.dump(self._identity, message, pending, named)
        if path and error.args:
            error.args = (f"{error.args[0]} (Last batches: {path})", *error.args[1:])
        for state in states:
            for device in state.exchange.devices.values():
                device.close(False)
            self.sets.fail_pending(state, error)
        self.stop_work.finish(error=None)

    def _on_failed(self, rank: int, note: Note) -> None:
        """Handle a note of kind "failed" from a peer."""
        error = _OF_NOTES.get(note["error"], RankLostError)(note["message"])
        self.fail(error, departed=note["departed"], notify=False)

    def fail_lost(self, who: str) -> None:
        """Fail because a rank has died."""
        error = RankLostError(
            f"{who} died while {self._identity} was waiting for it. Check the last output of the dead rank, "
            "and look for the kernel's out-of-memory killer in the output of `dmesg` on its host."
        )
        self.fail(error, departed=who)

    def fail_by(self, error: BaseException) -> None:
        """Fail with an error, or with RankLostError if the error shows that a rank has died."""
        if isinstance(error, CollectiveError):
            self.fail(error)
            return
        lost = self.transport.lost(error)
        if lost is None:
            self.fail(EngineError.of(self._identity, error))
            return
        self.peers.read_notes()  # the lost rank may have sent a note with the reason
        if not self.closed:
            who = ", ".join(str(self.transport.identities[rank]) for rank in lost)
            self.fail_lost(who or "A rank")

    def abandon(self, work: Work) -> None:
        """Fail a Work that an interrupt kept out of all collections. Called after the engine has ended."""
        if not work.done():
            work.finish(error=None if work is self.stop_work else self.error())

    def error(self) -> CollectiveError:
        """Return the error for requests that are submitted or waited for after the end."""
        if self.broken is not None:
            self.lost_results = False
            return type(self.broken)(str(self.broken))
        reason = self._reason or "This rank has shut down"
        return ShutDownError(f"{reason}. No further operations can be submitted.")

    def disown(self, origin: str) -> None:
        """Refuse collectives in a rank's child process. ``origin``: "was forked from" or "was started by"."""
        self.broken = NotInitializedError(
            f"This process (pid {os.getpid()}) {origin} {self._identity} and is not part of the job. It can "
            "call rank() and size(), but only the rank itself can call collectives, not its DataLoader "
            "workers or other child processes. In the script, put code that child processes must not run "
            'under `if __name__ == "__main__":`.'
        )
        self.closed = True
