"""What all that judges a training shares: thresholds, who waits for whom, how far few steps spread.

Used by the summary of a job, ``ringdance report``, ``bench`` and ``plan``. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WORTH = 0.2
"""Share of the time above which waiting limits a run."""
LITTLE = 0.1
"""Share of a measured speed below which a difference is not worth a change."""
IDLE_CORES = 0.5
"""A rank or loader that uses less of a core waits for something most of the time."""
NO_CORES = 0.15
"""One that uses less does not lack cores either, whatever else keeps them busy."""
BUSY = 0.85
"""Share of the cores' time above which they are busy."""
TAKEN = 0.2
"""Share of the cores that other programs use above which they may be the cause."""
FULL_CORES, FULL_GPU = 0.75, 0.9
"""Shares above which a run that computes uses what there is."""
IDLE_GPU = 0.5
"""Share below which a GPU waits for something."""
LEAST = 0.05
"""Share of a step that a rank's own work has at least: samples are taken in mid step, and may show none."""


class Waiting(NamedTuple):
    """How ranks wait for their exchanges. All of them end one together, so the slowest waits least.

    Attributes:
        slowest: Index of the slowest rank.
        communication: Share of the time that even the slowest rank waits.
        skew: Share of the time that the others wait beyond that, for the slowest.
        longer: How many times as long the slowest rank's own work takes as the others'.
    """

    slowest: int
    communication: float
    skew: float
    longer: float


def waiting(shares: Sequence[float]) -> Waiting:
    """Return who waits for whom, by the share of the time that each rank waits."""
    least = min(shares)
    slowest = shares.index(least)
    others = median([*shares[:slowest], *shares[slowest + 1 :]] or shares)
    return Waiting(slowest, least, others - least, (1 - least) / max(1 - others, LEAST))


def spread(times: Sequence[float]) -> float:
    """Return the standard deviation of some times, by their median deviation: a few may be hiccups."""
    middle = median(times)
    # 1.48 is the ratio for a normal distribution; few values lie closer together than many.
    return 1.48 * len(times) / (len(times) - 0.8) * median([abs(one - middle) for one in times])
