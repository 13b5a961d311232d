"""Divide the cores of a host among its ranks, and between computing and exchanging."""

from __future__ import annotations

import os

from ringdance.core.engine import Engine
from ringdance.host.limits import shared_cores
from ringdance.training import session


def share_of_cores() -> int:
    """Return the number of threads for this rank: ``OMP_NUM_THREADS``, or its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdigit() and int(threads) else max(1, own_cores())


def own_cores() -> int:
    """Return this rank's share of the usable cores, which may be 0. Outside a job, return all of them."""
    return shared_cores(session.engine().local_pids if session.is_initialized() else ())


def wants_overlap(engine: Engine, threads: int) -> bool:
    """Return True if this rank should exchange gradients while it computes with ``threads`` threads."""
    wanted = engine.settings.overlap
    return wanted == "on" or (wanted == "auto" and shared_cores(engine.local_pids) > threads)
