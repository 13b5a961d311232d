"""Exchange notes with an engine's peers, and detect lost ranks and stalls."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from ringdance.core.callers import Callers
from ringdance.core.process_sets.registry import ProcessSets
from ringdance.core.recorder import Recorder
from ringdance.core.reports.stacks import all_stacks
from ringdance.core.stalls import StallWatch
from ringdance.core.transport.base import Transport
from ringdance.errors import StallError
from ringdance.settings import Settings

Note = dict[str, Any]


class Peers:
    """Exchanges notes (JSON objects with a ``kind``) with the other ranks, and checks on them.

    Threads: all methods except ``missing`` run in a step of the engine or in ``Stepper.exclusively``.
    Posting a note also tests the pending sends of earlier notes, which two threads must not do concurrently.

    Args:
        transport: Connects all ranks.
        settings: The engine's settings.
        sets: The process sets.
        callers: The threads that are waiting.
        recorder: Records stalls and writes the files about them.

    Attributes:
        handlers: Note handlers by kind. Each is called with the sender's rank and the note. The engine and
            ``EngineEnd`` add their own handlers.
    """

    def __init__(
        self, transport: Transport, settings: Settings, sets: ProcessSets, callers: Callers,
        recorder: Recorder,
    ) -> None:
        self._transport, self._sets, self._recorder = transport, sets, recorder
        self._identity = transport.identities[transport.rank]
        self._watch = StallWatch(transport, settings, sets, callers, recorder)
        self.handlers: dict[str, Callable[[int, Note], None]] = {
            "ask": lambda rank, note: self.post(rank, self._watch.status()),
            "status": self._watch.on_status,
            "look": lambda rank, note: self.post(rank, self._watch.look(note["rank"])),
            "seen": lambda rank, note: self._watch.on_seen(note),
            "pause": self._on_pause,
            "left": sets.on_left,
            "stacks": lambda rank, note: self._save_stacks(transport.rank, all_stacks()),
        }

    def post_all(self, note: Note) -> None:
        """Send a note to all other ranks. Ranks that cannot be reached are skipped."""
        for rank in range(self._transport.size):
            if rank != self._transport.rank:
                self.post(rank, note)

    def post(self, rank: int, note: Note) -> None:
        """Send a note to a rank. Does nothing if the rank cannot be reached."""
        with contextlib.suppress(Exception):
            self._transport.post(rank, json.dumps(note).encode())

    def read_notes(self) -> None:
        """Handle the notes that have arrived."""
        for sender, message in self._transport.messages():
            note = json.loads(message)
            if handler := self.handlers.get(note["kind"]):
                handler(sender, note)

    def pause(self, what: str, seconds: float) -> tuple[str, float]:
        """Suppress stall reports on all ranks while this rank runs ``what``, for at most ``seconds``.

        If ``seconds`` is 0, the pause ends. Returns the name and end time (monotonic) of the pause that this
        call replaces.
        """
        before = self._watch.pauses.get(self._transport.rank, (what, 0.0))
        note = {"kind": "pause", "what": what, "seconds": seconds}
        self._on_pause(self._transport.rank, note)
        self.post_all(note)
        return before

    def _on_pause(self, rank: int, note: Note) -> None:
        if note["seconds"]:
            self._watch.pauses[rank] = note["what"], time.monotonic() + note["seconds"]
        else:
            self._watch.pauses.pop(rank, None)

    def lost(self) -> str:
        """Describe a rank on this host that exited while a round waited for it, or return "" if none did."""
        for rank in self._waited_for():
            if self._transport.state(rank) == "gone":
                return str(self._transport.identities[rank])
        return ""

    def stall(self) -> tuple[str, type[StallError] | None]:
        """Return a warning ("" if nothing has stalled), and the type of the error to fail with, if any."""
        text, error = self._watch.check()
        if not text:
            return "", None
        self._recorder.text(text)
        path = self._save(text)
        return text + (f" (Details and stacks: {path})" if path and error is None else ""), error

    def _save(self, text: str) -> str | None:
        """Write the reported stall to a JSON file and return its path. Makes all ranks write their stacks."""
        stall = self._watch.reported
        assert stall is not None
        self.post_all({"kind": "stacks"})
        self._save_stacks(self._transport.rank, all_stacks())
        for rank, stacks in stall.stacks.items():  # ranks that do not answer cannot write their own stacks
            self._save_stacks(rank, stacks)
        content = {"time": time.time(), "message": text, **stall.as_json()}
        return self._recorder.save("stall", self._identity, json.dumps(content, indent=1))

    def _save_stacks(self, rank: int, text: str) -> None:
        if text:
            self._recorder.save("stacks", self._transport.identities[rank], text)

    def missing(self) -> str:
        """Describe the ranks on this host that rounds are waiting for ("other ranks" if none are known)."""
        ranks = self._waited_for()
        return ", ".join(str(self._transport.identities[rank]) for rank in ranks) or "other ranks"

    def _waited_for(self) -> list[int]:
        """Return the ranks on this host that have not signaled in a round that this rank has entered."""
        waited_for = set()
        for state in self._sets.states():
            window, group = state.transport.window, state.transport.host_group
            if state.in_round and window is not None:
                waited_for |= {state.members[group[index]] for index in window.missing()}
        return sorted(waited_for)
