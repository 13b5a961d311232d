"""The other ranks of an engine: notes to and from them, lost ranks, stalls."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

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
        self.watch = StallWatch(engine.transport, engine.settings, engine.sets.ranks)

    def post_all(self, note: dict[str, Any]) -> None:
        """Send a note to all other ranks, as far as they can be reached."""
        for rank in range(self._transport.size):
            if rank != self._transport.rank:
                self.post(rank, note)

    def post(self, rank: int, note: dict[str, Any]) -> None:
        """Send a note to a rank, if it can be reached."""
        with contextlib.suppress(Exception):
            self._transport.post(rank, json.dumps(note).encode())

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
        if self._transport.rank:
            if summary.wanted(0.5):  # rank 0's clock decides
                self.post(0, {"kind": "figures", "figures": summary.figures()})
            return
        while summary.wanted() and not summary.complete and time.monotonic() < limit:
            self.read_notes()
            time.sleep(1e-3)

    def check(self) -> None:
        """Read notes, notice lost peers, check for stalls."""
        self.read_notes()
        engine = self._engine
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
        if error is not None:
            engine.fail(error(text))
        else:
            engine.report(text)

    def missing(self) -> str:
        """Return the ranks of this host that rounds wait for, or "other ranks"."""
        missing = {
            str(state.transport.identities[state.transport.host_group[index]])
            for state in self._engine.sets.states()
            if state.transport.window is not None
            for index in state.transport.window.missing()
        }
        return ", ".join(sorted(missing)) or "other ranks"
