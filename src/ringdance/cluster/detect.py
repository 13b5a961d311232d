"""Detect which scheduler has allocated hosts to this process."""

from __future__ import annotations

from collections.abc import Mapping

from ringdance.cluster import kubernetes, lsf, sagemaker, slurm
from ringdance.cluster.allocation import Allocation


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """Return the hosts allocated to this process, None outside of any scheduler.

    Args:
        environ: environment of this process.

    Raises:
        LaunchError: a scheduler's variables cannot be parsed.
    """
    for read in (kubernetes.allocation, sagemaker.allocation, slurm.allocation, lsf.allocation):
        if found := read(environ):
            return found
    return None
