"""The threads that call an engine: what they wait for, and when they have submitted."""

from __future__ import annotations

import sys
import time
from typing import Any

from ringdance.core.request import Work

__all__ = ["Callers"]


class Callers:
    """The threads that have called the engine of this rank.

    Any thread may change the dictionaries, by one subscript or one call each, which no lock has to guard.

    Attributes:
        waiting: what threads wait for, by a key of each wait. While there is any, all that is pending is due,
            in every set: two ranks may wait for two sets in different orders.
        submitted: by thread, when it has submitted last (monotonic).
    """

    def __init__(self) -> None:
        self.waiting: dict[object, Work] = {}
        self.submitted: dict[int, float] = {}

    def waits_in(self, set_id: int) -> bool:
        """Return whether a thread waits for a Work of a process set that is not done."""
        works = tuple(self.waiting.values())
        return any(work.request.set_id == set_id and not work.done() for work in works)

    def status(self) -> dict[str, Any]:
        """Return for ``reports.deadlock`` whether all threads wait, and for how long none has submitted.

        Returns:
            ``blocked``: some threads that live have submitted, and all of them wait; ``quiet``: seconds.
        """
        known = list(self.submitted)  # before the frames: a thread that begins now is in neither
        living = sys._current_frames()
        for thread in known:
            if thread not in living:
                self.submitted.pop(thread, None)
        submitted = dict(self.submitted)
        waiting = {work.thread for work in tuple(self.waiting.values())}
        return {
            "blocked": bool(submitted) and waiting.issuperset(submitted),
            "quiet": time.monotonic() - max(submitted.values(), default=0.0),
        }
