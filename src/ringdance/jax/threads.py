"""Limit XLA's threads on the CPU to a rank's share of the cores."""

from __future__ import annotations

import os

from ringdance.training import session
from ringdance.training.gradients.cores import share_of_cores

# XLA reads both variables. The second one has the older name.
_VARIABLES = ("PJRT_NPROC", "NPROC")


def _limit() -> None:
    """Limit XLA to this rank's share of the cores. Called after ``init()``.

    Otherwise, each process would use all cores of the host. If the user has set ``NPROC`` or ``PJRT_NPROC``,
    their values are not changed. If JAX was already in use, XLA keeps one thread per core of the host.
    """
    if session.engine().local_size > 1 and not any(name in os.environ for name in _VARIABLES):
        os.environ |= dict.fromkeys(_VARIABLES, str(share_of_cores()))


session.at_init(_limit)
