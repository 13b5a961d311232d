"""The MPI library that mpi4py loads, and its mpiexec."""

from __future__ import annotations

import glob
import os
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.errors import LaunchError, pip_install
from ringdance.launch.mpi.library import family_of, find_mpi, mpi4py_variants, wheel_of


def collect(usage: Usage) -> dict[str, Any]:
    """Library, its mpiexec and whether that starts; others in LD_LIBRARY_PATH."""
    found: dict[str, Any] = {"family": "", "mpiexec": "", "source": "", "error": "", "version": None}
    try:
        mpi = find_mpi()
        found |= {"family": mpi.family, "mpiexec": mpi.mpiexec, "source": mpi.source}
        found["version"] = _version(mpi.mpiexec)
    except LaunchError as error:
        found["error"] = str(error)
    found["prefix"] = prefix = os.path.dirname(os.path.dirname(found["mpiexec"]))
    found["reinstall"] = pip_install("--force-reinstall", wheel_of(found["family"]))
    found["other_libraries"] = [
        library
        for directory in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
        for library in sorted(glob.glob(f"{glob.escape(directory)}/libmpi.so*"))
        if not prefix or not library.startswith(f"{prefix}/")
    ]
    found["mpi4py"] = mpi4py_variants()
    return found


def _version(path: str) -> dict[str, Any]:
    """Run ``mpiexec --version``."""
    code, output, errors = files.run([path, "--version"])
    family = family_of(f"{output}\n{errors}") or ""
    shown = files.last_line(errors or output) or "no output"
    return {"path": path, "code": code, "family": family, "output": shown}
