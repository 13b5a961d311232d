"""The other ranks of an engine: notes to and from them, lost ranks, stalls."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringdance.core.reports.stacks import all_stacks
from ringdance.core.reports.stalls import StallWatch
from ringdance.errors import DeadlockError, RankLostError, StallError

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

__all__ = ["Peers"]

_FIGURES_S = 1.0  # all ranks send them at the same time
_ERRORS = {"StallError": StallError, "DeadlockError": DeadlockError}


class Peers:
    """Exchanges notes (JSON objects with a ``kind``) with the other ranks, and checks on them.

    Args:
        engine: this rank's; stopped or failed when a peer says so or is lost.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport = engine.transport
        self._outbox: list[dict[str, Any]] = []  # notes of other threads, posted by the next check
        self.watch = StallWatch(engine.transport, engine.settings, engine.sets.ranks, engine.recorder)

    def post_all(self, note: dict[str, Any]) -> None:
        """Send a note to all other ranks, as far as they can be reached."""
        for rank in range(self._transport.size):
            if rank != self._transport.rank:
                self.post(rank, note)

    def post(self, rank: int, note: dict[str, Any]) -> None:
        """Send a note to a rank, if it can be reached."""
        with contextlib.suppress(Exception):
            self._transport.post(rank, json.dumps(note).encode())

    @contextlib.contextmanager
    def pause(self, what: str, seconds: float) -> Iterator[None]:
        """Let no rank report stalls while this rank is in ``what``, for at most so many seconds."""
        outer, until = self.watch.pauses.get(self._transport.rank, (what, 0.0))
        self._post_pause(what, seconds)
        try:
            yield
        finally:
            self._post_pause(outer, max(0.0, until - time.monotonic()))

    def _post_pause(self, what: str, seconds: float) -> None:
        note = {"kind": "pause", "what": what, "seconds": seconds}
        self._on_pause(self._transport.rank, note)
        if self._transport.several_threads and self._transport.size > 1:
            self._outbox.append(note)
        else:
            self.post_all(note)

    def _on_pause(self, rank: int, note: dict[str, Any]) -> None:
        if note["seconds"]:
            self.watch.pauses[rank] = note["what"], time.monotonic() + note["seconds"]
        else:
            self.watch.pauses.pop(rank, None)

    def read_notes(self) -> None:
        """Act on the notes that have arrived."""
        for sender, message in self._transport.messages():
            self._on_note(sender, json.loads(message))

    def _on_note(self, sender: int, note: dict[str, Any]) -> None:
        engine, kind = self._engine, note["kind"]
        if kind == "ask":
            status = self.watch.status(engine.sets.states())
            self._transport.post(sender, json.dumps(status).encode())
        elif kind == "status":
            self.watch.on_status(sender, note)
        elif kind == "look":
            self.post(sender, self.watch.look(note["rank"]))
        elif kind == "seen":
            self.watch.on_seen(note)
        elif kind == "pause":
            self._on_pause(sender, note)
        elif kind == "stacks":
            self._save_stacks(engine.rank, all_stacks())
        elif kind == "monitor":
            engine.on_monitor(note)
        elif kind == "figures":
            engine.summary.on_note(sender, note)
        elif kind == "stop":
            engine.departed = engine.departed or note["departed"]
            engine.stop(f"{self._transport.identities[sender]} {note['reason']}")
        elif kind == "failed" and not engine.closed:
            engine.departed = engine.departed or note["departed"]
            engine.fail(_ERRORS.get(note["error"], RankLostError)(note["message"]), notify=False)

    def exchange_figures(self) -> None:
        """Send this rank's figures for the summary to rank 0, which waits a moment for those of all ranks."""
        summary, limit = self._engine.summary, time.monotonic() + _FIGURES_S
        self._engine.recorder.publish()
        if self._transport.rank:
            if summary.wanted(0.5):  # rank 0's clock decides
                self.post(0, {"kind": "figures", "figures": summary.figures()})
            return
        while summary.wanted() and not summary.complete and time.monotonic() < limit:
            self.read_notes()
            time.sleep(1e-3)

    def check(self) -> None:
        """Exchange notes, notice lost peers, check for stalls."""
        while self._outbox:
            self.post_all(self._outbox.pop(0))
        self.read_notes()
        engine = self._engine
        engine.recorder.publish()
        if engine.closed:
            return
        states = engine.sets.states()
        for state in states:
            window = state.transport.window
            if state.in_round and window is not None:
                for index in window.missing():
                    rank = state.transport.host_group[index]
                    if state.transport.state(rank) == "gone":
                        self.read_notes()  # what it sent before says more
                        if not engine.closed:
                            engine.fail_lost(str(state.transport.identities[rank]))
                        return
        text, error = self.watch.check(states)
        if text is None:
            return
        engine.recorder.text(text)
        path = self._save(text)
        if error is not None:
            engine.fail(error(text))
        else:
            engine.report(text + (f" (Details and stacks: {path})" if path else ""))

    def _save(self, text: str) -> str | None:
        """Write what was reported as JSON, and let all ranks write their stacks; return the file's path."""
        engine, stall = self._engine, self.watch.reported
        if stall is None:
            return None
        self.post_all({"kind": "stacks"})
        self._save_stacks(engine.rank, all_stacks())
        for rank, stacks in stall.stacks.items():  # they cannot do so themselves
            self._save_stacks(rank, stacks)
        content = {"time": time.time(), "message": text, **stall.as_json()}
        return engine.recorder.save("stall", engine.identity, json.dumps(content, indent=1))

    def _save_stacks(self, rank: int, text: str) -> None:
        if text:
            self._engine.recorder.save("stacks", self._transport.identities[rank], text)

    def missing(self) -> str:
        """Return the ranks of this host that rounds wait for, or "other ranks"."""
        missing = {
            str(state.transport.identities[state.transport.host_group[index]])
            for state in self._engine.sets.states()
            if state.transport.window is not None
            for index in state.transport.window.missing()
        }
        return ", ".join(sorted(missing)) or "other ranks"
