"""Detect deadlocks: all ranks wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.core.reports.stall_message import pending_names

__all__ = ["deadlocked"]


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
