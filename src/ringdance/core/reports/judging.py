"""Helpers for tools that assess a training run: thresholds, waiting times and the spread of timings.

Used by the summary of a job, ``ringdance report``, ``bench`` and ``plan``. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WORTH = 0.2
"""If a larger share of the time is spent waiting, waiting limits the run."""
LITTLE = 0.1
"""A difference below this share of the measured speed does not justify a change."""
IDLE_CORES = 0.5
"""A rank or loader that uses a smaller share of a core spends most of its time waiting."""
NO_CORES = 0.15
"""A rank or loader that uses a smaller share of a core does not lack cores, even if all are busy."""
BUSY = 0.85
"""Share of the cores' time above which the cores are busy."""
TAKEN = 0.2
"""If other programs use a larger share of the cores, they may be slowing the run down."""
FULL_CORES, FULL_GPU = 0.75, 0.9
"""A run that computes and exceeds these shares uses its hardware fully."""
IDLE_GPU = 0.5
"""A GPU that is used for a smaller share of the time is waiting for something."""
LEAST = 0.05
"""Minimum share of a step assumed for a rank's own work, because samples taken mid-step may show none."""


class Waiting(NamedTuple):
    """How ranks wait for their exchanges. All ranks finish an exchange together, so the slowest waits least.

    Attributes:
        slowest: Index of the slowest rank.
        communication: Share of the time that even the slowest rank waits.
        skew: Additional share of the time that the other ranks (median) wait for the slowest rank.
        longer: Ratio of the slowest rank's working time to the median working time of the other ranks.
    """

    slowest: int
    communication: float
    skew: float
    longer: float


def waiting(shares: Sequence[float]) -> Waiting:
    """Find the slowest rank, given the share of the time that each rank waits."""
    least = min(shares)
    slowest = shares.index(least)
    others = median([*shares[:slowest], *shares[slowest + 1 :]] or shares)
    return Waiting(slowest, least, others - least, (1 - least) / max(1 - others, LEAST))


def spread(times: Sequence[float]) -> float:
    """Estimate the standard deviation from the median absolute deviation, which tolerates outliers."""
    middle = median(times)
    # 1.48 is the ratio for a normal distribution. The other factor corrects for the bias of small samples.
    return 1.48 * len(times) / (len(times) - 0.8) * median([abs(time - middle) for time in times])
