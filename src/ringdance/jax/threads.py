"""Limit XLA's threads on the CPU to a rank's share of the cores."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ringdance import session
from ringdance.training import basics
from ringdance.training.gradients.options import share_of_cores
from ringdance.training.process_sets import ProcessSet

# Both are XLA's; the second is the older one.
_VARIABLES = ("PJRT_NPROC", "NPROC")


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Join the job, as ``ringdance.training.basics.init``, and limit XLA to this rank's share of the cores.

    Otherwise each process would use all cores of the host. The user's ``NPROC`` or ``PJRT_NPROC`` stays.
    If JAX was in use before, XLA keeps as many threads as there are cores.
    """
    basics.init(comm, process_sets)
    local_size = session.engine().local_size
    if local_size > 1 and not any(name in os.environ for name in _VARIABLES):
        os.environ |= dict.fromkeys(_VARIABLES, str(share_of_cores()))
