"""The MPI library that mpi4py loads, the mpiexecs in reach, and what could get in between."""

from __future__ import annotations

import glob
import importlib.metadata
import os
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted
from ringdance.errors import LaunchError
from ringdance.launch.mpi import family_of, find_mpi


def look(wanted: Wanted) -> dict[str, Any]:
    """Library, its mpiexec and whether that starts; mpiexecs in PATH; libraries in LD_LIBRARY_PATH."""
    found: dict[str, Any] = {"family": "", "mpiexec": "", "source": "", "error": "", "library": ""}
    try:
        mpi = find_mpi()
        found |= {"family": mpi.family, "mpiexec": mpi.mpiexec, "source": mpi.source}
        found["answer"] = _answer(mpi.mpiexec)
    except LaunchError as error:
        found["error"] = str(error)
    found["in_path"] = _in_path()
    found["components"] = _components(found["mpiexec"])
    found["preloaded"] = _libraries(os.environ.get("LD_LIBRARY_PATH", ""))
    found["prefix"] = os.path.dirname(os.path.dirname(found["mpiexec"]))
    found["mpi4py"] = _variants()
    return found


def _answer(path: str) -> dict[str, Any]:
    """What ``mpiexec --version`` says."""
    code, said, errors = files.run([path, "--version"], 20)
    both = f"{said}\n{errors}"
    return {
        "path": path,
        "code": code,
        "family": family_of(both) or "",
        "said": files.last_line(errors or said),
    }


def _in_path() -> list[dict[str, Any]]:
    """Each mpiexec, mpirun of PATH, in its order; the same file once."""
    found: dict[str, str] = {}
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for name in ("mpiexec", "mpirun"):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                found.setdefault(os.path.dirname(os.path.realpath(path)), path)
    return [_answer(path) for path in found.values()]


def _components(mpiexec: str) -> list[str]:
    """Names of Open MPI's components that lie beside the library, those for UCX windows in particular."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(mpiexec))) if mpiexec else ""
    found = []
    for base in (f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/lib/x86_64-linux-gnu"):
        for kind in ("osc", "pml", "btl"):
            found += [
                os.path.basename(p)[4:-3]
                for p in glob.glob(f"{base}/openmpi*/**/mca_{kind}_*.so", recursive=True)
            ]
        # A library that holds its components inside names them in its strings.
        for library in glob.glob(f"{base}/libmpi.so.*")[:1]:
            with open(library, "rb") as file:
                if b"mca_osc_ucx_component" in file.read():
                    found.append("osc_ucx")
    return sorted(set(found))


def _libraries(path: str) -> list[str]:
    """MPI libraries in the folders of a search path."""
    return [
        library
        for folder in path.split(os.pathsep)
        if folder
        for library in sorted(glob.glob(f"{glob.escape(folder)}/libmpi.so*"))[:1]
    ]


def _variants() -> list[str]:
    """The libraries that the installed mpi4py was built for: ``openmpi``, ``mpich``; or ``own``."""
    try:
        distribution = importlib.metadata.distribution("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        return []
    names = [
        file.name for file in distribution.files or () if file.name.startswith("MPI.") and ".so" in file.name
    ]
    named = {name for name in ("openmpi", "mpich", "impi") if any(f".{name}." in file for file in names)}
    return sorted(named) or ["own"]
