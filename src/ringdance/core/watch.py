"""Watching: what each rank is doing, told to those who wait for it.

A rank that has waited for some seconds, or has had an asynchronous request pending for so long,
asks the members of the set for their status; the engine thread answers, even while the main
thread computes. The lowest waiting rank then says once who has not submitted what, and where
its main thread is.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ringdance.core.process_set import ProcessSetState
from ringdance.errors import OUT_OF_DATA
from ringdance.transport.base import Identity, Transport

__all__ = ["StallWatch", "main_thread_place", "stall_message"]

_ANSWER_TIME = 0.5
_MOST_NAMES = 6
_OWN = ("ringdance", "horovod")
_PYTHONS = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def main_thread_place() -> str:
    """Return file, line and function of the user's code that the main thread executes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # The user's own line says more than that of a library which it calls: go outward past those.
    inner = script = frame
    while frame is not None and not _is_users(frame):
        if frame.f_globals.get("__name__") == "__main__":
            script = frame
        frame = frame.f_back
    frame = frame or script or inner
    if frame is None:
        return "unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(frame: FrameType) -> bool:
    """Whether this is neither our code nor an installed package's nor Python's own."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = frame.f_code.co_filename
    return package not in _OWN and not (path.startswith(_PYTHONS) or _INSTALLED.search(path))


@dataclass
class _Inquiry:
    asked: float
    waited: float
    name: str
    set_id: int
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)


class StallWatch:
    """Looks after what this rank waits for.

    Args:
        transport: the whole job's; notes go through it.
        check_seconds: report after this time, and again after twice, four times that.
        shutdown_seconds: give up after this time; 0: never.
    """

    def __init__(
        self, transport: Transport, check_seconds: float, shutdown_seconds: float, disabled: bool
    ) -> None:
        self._transport = transport
        self._check = check_seconds
        self._shutdown = shutdown_seconds
        self._disabled = disabled
        self._next_report: dict[tuple[int, str], float] = {}
        self._inquiry: _Inquiry | None = None

    def status(self, sets: list[ProcessSetState]) -> dict[str, Any]:
        """Return this rank's answer to an inquiry."""
        pending = [(s.set_id, t.name) for s in sets for t in s.tickets() if t.refusal is None]
        return {
            "kind": "status",
            "pending": pending[:200],
            "waiting": any(s.waiting for s in sets),
            "joined": any(s.join_ticket is not None for s in sets),
            "where": main_thread_place(),
        }

    def hear(self, sender: int, note: dict[str, Any]) -> None:
        """Take in another rank's answer."""
        if self._inquiry is not None:
            self._inquiry.answers[sender] = note

    def check(self, sets: list[ProcessSetState]) -> tuple[str | None, bool]:
        """Return (what to tell people, whether to give up)."""
        if self._disabled:
            return None, False
        now = time.monotonic()
        if self._inquiry is not None:
            return self._conclude(now, sets)
        oldest = self._oldest(sets, now)
        if oldest is not None:
            set_state, name, age = oldest
            self._next_report[(set_state.set_id, name)] = age * 2
            self._inquiry = _Inquiry(now, age, name, set_state.set_id)
            for place in set_state.members:
                if place != self._transport.rank:
                    self._transport.post(place, json.dumps({"kind": "ask"}).encode())
        return None, False

    def _oldest(self, sets: list[ProcessSetState], now: float) -> tuple[ProcessSetState, str, float] | None:
        waiting = [
            (state, ticket.name, now - ticket.submitted)
            for state in sets
            if state.waiting or state.eager_since is not None
            for ticket in state.tickets()
            if ticket.refusal is None and ticket is not state.join_ticket
        ]
        if not waiting:
            self._next_report.clear()
            return None
        oldest = max(waiting, key=lambda item: item[2])
        due = self._next_report.get((oldest[0].set_id, oldest[1]), self._check)
        if 0 < self._shutdown <= oldest[2]:
            due = min(due, self._shutdown)
        return oldest if oldest[2] >= due else None

    def _conclude(self, now: float, sets: list[ProcessSetState]) -> tuple[str | None, bool]:
        inquiry = self._inquiry
        assert inquiry is not None
        state = next((s for s in sets if s.set_id == inquiry.set_id), None)
        if state is None or all(ticket.name != inquiry.name for ticket in state.tickets()):
            self._inquiry = None
            return None, False
        others = [place for place in state.members if place != self._transport.rank]
        if now - inquiry.asked < _ANSWER_TIME and any(place not in inquiry.answers for place in others):
            return None, False
        self._inquiry = None
        give_up = 0 < self._shutdown <= inquiry.waited + 0.001
        own = self._transport.rank
        if not give_up and any(inquiry.answers.get(p, {}).get("waiting") for p in others if p < own):
            return None, False  # a lower rank waits too, and will say it
        states = {place: self._transport.state(place) for place in others}
        own_status = self.status(sets)
        return (
            stall_message(
                self._transport.identities,
                own,
                own_status,
                inquiry.waited,
                inquiry.name,
                inquiry.set_id,
                others,
                inquiry.answers,
                states,
            ),
            give_up,
        )


def stall_message(
    who: tuple[Identity, ...],
    own: int,
    own_status: dict[str, Any],
    waited: float,
    name: str,
    set_id: int,
    others: list[int],
    answers: dict[int, dict[str, Any]],
    states: dict[int, str],
) -> str:
    """Return the sentence about a stall: who waits for what, and what the others do instead."""
    late = []
    kind = "has waited {:.0f} s for" if own_status["waiting"] else "submitted {:.0f} s ago"
    for place in others:
        answer = answers.get(place)
        if answer is None:
            doing = {
                "stopped": "its process is stopped (SIGSTOP or a debugger)",
                "gone": "its process is gone",
            }.get(
                states[place], "it does not answer: its process may hang in a call that holds Python's lock"
            )
            late.append(f"{who[place]}: {doing}")
            continue
        names = [pending for sid, pending in answer["pending"] if sid == set_id]
        if name in names:
            continue
        if answer["joined"]:
            doing = "it has joined"
        elif names:
            more = "" if len(names) <= _MOST_NAMES else f" and {len(names) - _MOST_NAMES} more"
            doing = "it waits for " if answer["waiting"] else "it has submitted "
            doing += ", ".join(f"'{n}'" for n in names[:_MOST_NAMES]) + more
        else:
            doing = "it waits in another set" if answer["waiting"] else "it does not wait for anything"
        late.append(f"{who[place]}: {doing}; its main thread is at {answer['where']}")
    where = f" in process set {set_id}" if set_id else ""
    head = f"{who[own]} {kind.format(waited)} '{name}'{where} (its main thread is at {own_status['where']})."
    if not late:
        return f"{head} All members have submitted it; the exchange itself is slow or stuck."
    # Those who have no more batches can join, which helps with the reductions of all ranks.
    advice = f" {OUT_OF_DATA}" if set_id == 0 and "allreduce." in name else ""
    return f"{head} Not submitted by " + "; by ".join(late) + f". All ranks must make the same calls.{advice}"
