"""Detect the MPI library that starts the processes."""

from __future__ import annotations

from collections.abc import Mapping

from ringdance.errors import LaunchError
from ringdance.launch.mpi import find_mpi

__all__ = ["is_intel_mpi", "is_mpich", "is_open_mpi", "is_spectrum_mpi", "mpi_available"]


def _family() -> str:
    try:
        return find_mpi().family
    except LaunchError:
        return ""


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return True if an MPI library and its mpiexec are installed. ``env`` has no effect."""
    return bool(_family())


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return True if it is Open MPI."""
    return _family() == "openmpi"


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Return True if it is MPICH."""
    return _family() == "mpich"


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return True if it is Intel MPI."""
    return _family() == "intel"


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return False: IBM Spectrum MPI is started in the same way as Open MPI."""
    return False
