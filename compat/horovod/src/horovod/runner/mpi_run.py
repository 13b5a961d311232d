"""Which MPI library starts the processes."""

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
    """Whether an MPI library and its mpiexec are installed. `env` has no effect."""
    return bool(_family())


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Open MPI."""
    return _family() == "openmpi"


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is MPICH."""
    return _family() == "mpich"


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Intel MPI."""
    return _family() == "intel"


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is IBM Spectrum MPI: never, it is started as Open MPI."""
    return False
