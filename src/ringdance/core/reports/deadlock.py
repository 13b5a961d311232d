"""Detect deadlocks: all ranks wait for each other."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringdance.core.reports.stall_message import pending_names
from ringdance.core.request import Work

__all__ = ["Submitters", "deadlocked"]


class Submitters:
    """The threads of this rank that have submitted, and when each did so last (monotonic)."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}

    def status(self, callers: Iterable[Work]) -> dict[str, Any]:
        """Return whether all live ones wait, and for how long none has submitted."""
        living = sys._current_frames()
        self.last = {thread: when for thread, when in list(self.last.items()) if thread in living}
        waiting = {work.thread for work in callers}
        return {
            "blocked": bool(self.last) and waiting.issuperset(self.last),
            "quiet": time.monotonic() - max(self.last.values(), default=0.0),
        }


def deadlocked(sets: Mapping[int, Sequence[int]], statuses: Sequence[dict[str, Any]], seconds: float) -> bool:
    """Return whether all ranks wait and what they wait for can never begin.

    No thread that has ever submitted runs, none has submitted for ``seconds``, and in no process set is
    there a request that all members have submitted.

    Args:
        sets: the ranks of each process set.
        statuses: of all ranks, as from ``StallWatch.status``.
        seconds: how long nothing was submitted anywhere.
    """
    if any(not status["blocked"] or status["quiet"] < seconds for status in statuses):
        return False
    for set_id, ranks in sets.items():
        # A rank that has joined takes part in whatever the others submit.
        taking_part = [statuses[rank] for rank in ranks if set_id or not statuses[rank]["joined"]]
        pending = [set(pending_names(status, set_id)) for status in taking_part]
        if not pending or set.intersection(*pending):
            return False
    return True
