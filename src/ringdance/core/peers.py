"""The other ranks of an engine: notes to and from them, lost ranks, stalls."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from ringdance.core.callers import Callers
from ringdance.core.process_sets.registry import ProcessSets
from ringdance.core.recorder import Recorder
from ringdance.core.reports.stacks import all_stacks
from ringdance.core.stalls import StallWatch
from ringdance.errors import StallError
from ringdance.settings import Settings
from ringdance.transport.base import Transport

Note = dict[str, Any]


class Peers:
    """Exchanges notes (JSON objects with a ``kind``) with the other ranks, and checks on them.

    All methods but ``missing`` are called in a step of the engine or by ``ProgressEngine.exclusively``: to
    post a note tests the requests of earlier ones, which two threads must not do at once.

    Args:
        transport: of the whole job.
        settings: of the engine.
        sets: the process sets.
        callers: the threads that wait.
        recorder: writes the files about stalls.
        handlers: by kind, what is called with the sender's rank and the note.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        sets: ProcessSets,
        callers: Callers,
        recorder: Recorder,
        handlers: Mapping[str, Callable[[int, Note], None]],
    ) -> None:
        self._transport, self._sets, self._recorder = transport, sets, recorder
        self._identity = transport.identities[transport.rank]
        self._watch = StallWatch(transport, settings, sets, callers, recorder)
        self._handlers = {
            "ask": lambda rank, note: self.post(rank, self._watch.status()),
            "status": self._watch.on_status,
            "look": lambda rank, note: self.post(rank, self._watch.look(note["rank"])),
            "seen": lambda rank, note: self._watch.on_seen(note),
            "pause": self._on_pause,
            "left": sets.on_left,
            "stacks": lambda rank, note: self._save_stacks(transport.rank, all_stacks()),
            **handlers,
        }

    def post_all(self, note: Note) -> None:
        """Send a note to all other ranks, as far as they can be reached."""
        for rank in range(self._transport.size):
            if rank != self._transport.rank:
                self.post(rank, note)

    def post(self, rank: int, note: Note) -> None:
        """Send a note to a rank, if it can be reached."""
        with contextlib.suppress(Exception):
            self._transport.post(rank, json.dumps(note).encode())

    def read_notes(self) -> None:
        """Act on the notes that have arrived."""
        for sender, message in self._transport.messages():
            note = json.loads(message)
            if handler := self._handlers.get(note["kind"]):
                handler(sender, note)

    def pause(self, what: str, seconds: float) -> tuple[str, float]:
        """Let no rank report stalls while this rank is in ``what``, for at most so many seconds; 0 ends it.

        Returns what was marked before, and until when (monotonic).
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
        """Return a rank of this host that rounds wait for and whose process is gone, or ""."""
        for rank in self._waited_for():
            if self._transport.state(rank) == "gone":
                return str(self._transport.identities[rank])
        return ""

    def stall(self) -> tuple[str, type[StallError] | None]:
        """Return a warning about a stall or "", and the error to fail with or None."""
        text, error = self._watch.check()
        if not text:
            return "", None
        self._recorder.text(text)
        path = self._save(text)
        return text + (f" (Details and stacks: {path})" if path and error is None else ""), error

    def _save(self, text: str) -> str | None:
        """Write what was reported as JSON, and let all ranks write their stacks; return the file's path."""
        stall = self._watch.reported
        if stall is None:
            return None
        self.post_all({"kind": "stacks"})
        self._save_stacks(self._transport.rank, all_stacks())
        for rank, stacks in stall.stacks.items():  # they cannot do so themselves
            self._save_stacks(rank, stacks)
        content = {"time": time.time(), "message": text, **stall.as_json()}
        return self._recorder.save("stall", self._identity, json.dumps(content, indent=1))

    def _save_stacks(self, rank: int, text: str) -> None:
        if text:
            self._recorder.save("stacks", self._transport.identities[rank], text)

    def missing(self) -> str:
        """Return the ranks of this host that rounds wait for, or "other ranks"."""
        ranks = self._waited_for()
        return ", ".join(str(self._transport.identities[rank]) for rank in ranks) or "other ranks"

    def _waited_for(self) -> list[int]:
        """Return the ranks of this host that have not signalled in a round that this rank is in."""
        waited_for = set()
        for state in self._sets.states():
            window, group = state.transport.window, state.transport.host_group
            if state.in_round and window is not None:
                waited_for |= {state.members[group[index]] for index in window.missing()}
        return sorted(waited_for)
