"""Detect deadlocks, in which all ranks wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.core.reports.stall_message import pending_names


def deadlocked_for(sets: Mapping[int, Sequence[int]], statuses: Mapping[int, dict[str, Any]]) -> float:
    """Return for how many seconds all ranks have been blocked by operations that cannot start.

    The result is negative if the ranks are not all blocked by such operations.

    Operations cannot start if no process set has a request that all its members have submitted.

    Args:
        sets: Ranks of each process set.
        statuses: Status of every rank, by rank, from ``StallWatch.status``.
    """
    for set_id, ranks in sets.items():
        # A rank that has joined takes part in everything that other ranks submit.
        taking_part = [statuses[rank] for rank in ranks if set_id or not statuses[rank]["joined"]]
        pending = [set(pending_names(status, set_id)) for status in taking_part]
        if not pending or set.intersection(*pending):
            return -1.0
    return min(status["still"] if status["blocked"] else -1.0 for status in statuses.values())
