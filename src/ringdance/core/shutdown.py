"""How an engine ends: by agreement of all ranks, or broken; either way nobody is left waiting."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import time
from typing import Any

from ringdance.core.progress import Driver
from ringdance.core.reports.recorder import Recorder
from ringdance.core.request import Collective, Description, Request, Work
from ringdance.core.sets import ProcessSets
from ringdance.errors import (
    OUT_OF_DATA,
    CollectiveError,
    EngineError,
    NotInitializedError,
    RankLostError,
    ShutDownError,
)
from ringdance.settings import Settings
from ringdance.transport.base import Transport
from ringdance.transport.eventcount import Doorbell

__all__ = ["EngineEnd"]

_SHUTDOWN_PATIENCE = 30.0


class EngineEnd(ProcessSets):
    """The part of the engine that stops, fails and gives everything back. Attributes: see ``Engine``."""

    _driver: Driver | None = None
    _bell: Doorbell | None = None

    def __init__(self, transport: Transport, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.hosts = tuple(identity.host for identity in transport.identities)
        self.identity = transport.identities[self.rank]
        self.recorder = Recorder(settings.recorder_batches, settings.flight_recorder_dir)
        self.closed = False
        self.broken: CollectiveError | None = None
        self.failed_here = False
        self.unclean = False
        self.stopped_first = False
        self.departed = ""
        self.incomplete: list[str] = []
        self._stop_reason = ""
        self._stop_work = Work(Request(Description(Collective.BARRIER)), "shutdown", self._wait)

    @abc.abstractmethod
    def _wait(self, work: Work, timeout: float | None) -> None:
        """Block until a Work is done."""

    @abc.abstractmethod
    def _nudge(self) -> None:
        """Let whoever drives look for work."""

    @abc.abstractmethod
    def _hear(self, sender: int, note: dict[str, Any]) -> None:
        """Take in a note of another rank."""

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        for state, _ in self._machines:
            state.stopping = True

    def _read_notes(self) -> None:
        for sender, message in self.transport.messages():
            self._hear(sender, json.loads(message))

    def _tell_all(self, note: dict[str, Any]) -> None:
        message = json.dumps(note).encode()
        for place in range(self.size):
            if place != self.rank:
                with contextlib.suppress(Exception):
                    self.transport.post(place, message)

    def shutdown(
        self,
        reason: str = "has called shutdown()",
        patience: float = _SHUTDOWN_PATIENCE,
        departing: bool = False,
    ) -> bool:
        """Stop on all ranks; what is pending anywhere fails with ShutDownError.

        Args:
            reason: goes into the others' messages, after this rank's name.
            patience: seconds to wait for the others' agreement.
            departing: this rank's program ends, it will not come back.

        Returns:
            Whether all ranks agreed, so that nothing is left in flight.
        """
        if self._driver is None:
            self.closed = True
            return True
        if not self.closed:
            self.stopped_first = not self._stop_reason
            self._stop_reason = self._stop_reason or f"{self.identity} {reason}"
            departed = str(self.identity) if departing else ""
            self._tell_all({"kind": "stop", "reason": reason, "departed": departed})
            self._stop(self._stop_reason)
            self._nudge()
        try:
            # Also after an agreed stop: the engine thread may still be freeing communicators.
            self._driver.wait(self._stop_work, patience)
        except TimeoutError:
            missing = self._missing_ranks()
            self.fail(
                ShutDownError(f"{self.identity} {reason}, and {missing} did not agree in {patience:g} s.")
            )
        self._driver.join()
        return self.broken is None and self._stop_work.done()

    def _missing_ranks(self) -> str:
        missing = {
            str(state.transport.identities[state.transport.host_group[place]])
            for state, _ in self._machines
            if state.transport.window is not None
            for place in state.transport.window.missing()
        }
        return ", ".join(sorted(missing)) or "other ranks"

    def _close(self) -> None:
        """All sets have agreed to stop: give everything back."""
        self.closed = True
        self._learn_stop_reason()
        advice = f" {OUT_OF_DATA}" if self.departed else ""
        error = ShutDownError(f"{self._stop_reason} while this operation was pending.{advice}")
        for set_id in sorted(self._sets, reverse=True):
            state = self._sets[set_id].state
            if state is not None:
                self.unclean |= not state.calm
                self.incomplete += [t.name for t in state.in_flight() if t.refusal is None]
                self._fail_pending(state, error)
        self._bell = None
        try:
            for set_id in sorted(self._sets, reverse=True):
                state = self._sets[set_id].state
                if state is not None:
                    state.transport.close(True)
        finally:
            self._stop_work.finish()

    def _learn_stop_reason(self) -> None:
        """The note that says who stops can be slower than the round in which it does."""
        patience = time.monotonic() + 0.2
        while not self._stop_reason and time.monotonic() < patience:
            self._read_notes()
            time.sleep(1e-3)
        self._stop_reason = self._stop_reason or "Another rank has shut down"

    def fail(self, error: CollectiveError, tell: bool = True) -> None:
        """Break the engine: tell the peers, write down what was going on, fail all pending work."""
        if self.closed:
            return
        self.broken = error
        self.closed = True
        pending = [work.name for state, _ in self._machines for work in state.in_flight()]
        message = str(error)
        if tell:
            self.failed_here = True
            self._tell_all({
                "kind": "failed", "message": message, "departed": self.departed, "error": type(error).__name__
            })  # fmt: skip
        path = self.recorder.dump(self.identity, message, pending)
        if path and error.args:
            error.args = (f"{error.args[0]} (Last batches: {path})", *error.args[1:])
        for state, _ in self._machines:
            self._fail_pending(state, error)
        self._stop_work.finish(error=None)

    def disown(self) -> None:
        """In a forked child: answer rank and size, refuse collectives, leave the parent's memory alone."""
        if self.size == 1:
            return  # it works by itself
        self.broken = NotInitializedError(
            f"This process (pid {os.getpid()}) was forked from {self.identity} and is not part of the job: "
            "rank() and size() answer, collectives can be used in the rank itself only, not in DataLoader "
            "workers."
        )
        self.closed = True
        self._driver = self._bell = None  # the thread was not forked, and may have held locks

    def abandon(self, work: Work) -> None:
        """Fail a Work that an interrupt has taken out of all lists; the engine is closed."""
        if work.done():
            return
        work.finish(error=None if work is self._stop_work else self._closed_error())

    def leave(self, message: str) -> None:
        """This rank ends in an error: tell the others, who fail with RankLostError."""
        self.departed = str(self.identity)
        self.fail(RankLostError(message))

    def _closed_error(self) -> CollectiveError:
        if self.broken is not None:
            return type(self.broken)(str(self.broken))
        return ShutDownError(
            f"{self._stop_reason or 'This rank has shut down'}; nothing more can be submitted."
        )

    def thread_failed(self, error: BaseException) -> None:
        """The engine thread has ended in an error: nothing would start asynchronous work any more."""
        self.fail(self._failure(error))

    def _fail_for(self, who: str) -> None:
        """Fail because a rank has died."""
        self.departed = who
        self.fail(
            RankLostError(
                f"{who} died while {self.identity} waited for it. Look for its last output, "
                "or for the kernel's out-of-memory killer (dmesg) on its host."
            )
        )

    def _fail_by(self, error: Exception) -> None:
        """Fail because of an error in the engine or in MPI, which may mean that a rank has died."""
        lost = self.transport.lost(error)
        if lost is None:
            self.fail(self._failure(error))
            return
        self._read_notes()  # what it has sent before it went says more
        if not self.closed:
            self._fail_for(", ".join(str(self.transport.identities[place]) for place in lost) or "A rank")

    def _failure(self, error: BaseException) -> EngineError:
        failure = EngineError(f"The engine of {self.identity} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
