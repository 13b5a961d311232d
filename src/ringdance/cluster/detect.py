"""Detect which scheduler has allocated hosts to this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ringdance.cluster import kubernetes, lsf, sagemaker, slurm
from ringdance.cluster.allocation import Allocation


def detect(environ: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists) -> Allocation | None:
    """Return the hosts allocated to this process, None outside of any scheduler.

    Args:
        environ: environment of this process.
        exists: whether a file exists.

    Raises:
        LaunchError: a scheduler's variables cannot be parsed.
    """
    for read in (kubernetes.allocation, sagemaker.allocation, slurm.allocation, lsf.allocation):
        if found := read(environ, exists):
            return found
    return None
