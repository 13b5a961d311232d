"""Check the Python interpreter and the installed packages. Imports only the standard library."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import ringdance
from ringdance.tools.doctor.check import ERROR, NOTE, WARNING, Check, Finding, HostFacts, Usage, equal, limit

_REQUIRED = ("numpy", "ml_dtypes", "cloudpickle", "mpi4py", "psutil", "rich")
_COMPARED = ("numpy", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib")
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_DISTRIBUTIONS = dict.fromkeys((*_REQUIRED, *_COMPARED, *_NCCL, "horovod", "ringdance-horovod"))
_MODULES = ("numpy", "mpi4py", "torch", "tensorflow", "keras", "jax", "horovod", "ringdance")
_EASILY_SHADOWED = (
    "random", "types", "queue", "select", "signal", "socket", "logging", "copy", "json", "string", "code",
    "profile", "test", "platform", "operator", "calendar", "secrets", "statistics", "tokenize", "inspect",
)  # fmt: skip
_COMPAT = "in a clone of Ringdance: pip install ./compat/horovod"
_SAME_EVERYWHERE = (
    "install the same environment under the same path on all hosts (uv, conda-pack, a shared disk, one image)"
)

# --- facts -----------------------------------------------------------------------------------------


def python_facts(usage: Usage) -> dict[str, Any]:
    """Collect the interpreter's version and path, package versions, and files that shadow other modules."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "ringdance": ringdance.__version__,
        "versions": {name: text for name in _DISTRIBUTIONS if (text := _version(name))},
        "shadows": _shadows([usage.cwd or os.getcwd(), *path]),
        "user_site": _user_site(),
    }


def _version(name: str) -> str:
    """Return the version of a distribution, or "" if it is not installed."""
    try:
        return importlib.metadata.version(name) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _shadows(directories: list[str]) -> list[str]:
    """Return the files in ``directories`` that shadow an installed library or a standard library module."""
    paths = []
    for directory in dict.fromkeys(map(os.path.realpath, directories)):
        for name in (*_MODULES, *_EASILY_SHADOWED):
            for path in (f"{directory}/{name}.py", f"{directory}/{name}/__init__.py"):
                if os.path.isfile(path) and not _is_own(directory, name):
                    paths.append(path)
    return paths


def _is_own(directory: str, name: str) -> bool:
    """Return True if ``directory`` belongs to the interpreter or contains the installed package ``name``."""
    own = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    own.append(os.path.dirname(ringdance.__path__[0]))
    packaged = glob.glob(f"{glob.escape(directory)}/{name}*-info")
    return directory in map(os.path.realpath, own) or bool(packaged)


def _user_site() -> list[str]:
    """Return the packages in the user site directory that shadow packages in the environment."""
    directory = site.getusersitepackages()
    if not site.ENABLE_USER_SITE:
        return []
    finder = importlib.machinery.PathFinder()
    names = []
    for name in _MODULES:
        spec = finder.find_spec(name)
        hides = spec is not None and (spec.origin or "").startswith(directory + os.sep)
        if hides and finder.find_spec(name, [entry for entry in sys.path if entry != directory]):
            names.append(name)
    return names


# --- checks ----------------------------------------------------------------------------------------


def _requirements(host: HostFacts) -> Finding:
    facts = host["python"]
    python, versions = facts["executable"], facts["versions"]
    missing = [name for name in _REQUIRED if name not in versions]
    if missing:
        fix = f"{python} -m pip install {' '.join(missing)}"
        return Finding(f"not installed in the environment of {python}: {', '.join(missing)}", fix)
    return Finding(
        f"Python {facts['version']} ({python}), ringdance {facts['ringdance']}, "
        f"mpi4py {versions['mpi4py']}, numpy {versions['numpy']}"
    )


def _horovod(host: HostFacts) -> Finding | None:
    versions = host["python"]["versions"]
    if "horovod" not in versions:
        return None
    if "ringdance-horovod" in versions:
        return Finding(
            f"horovod {versions['horovod']} and ringdance-horovod are both installed and overwrite each "
            "other's files",
            f"pip uninstall -y horovod ringdance-horovod, then {_COMPAT}",
        )
    return Finding(
        f"horovod {versions['horovod']} is installed, so `import horovod` does not import Ringdance",
        f"pip uninstall -y horovod, then {_COMPAT}", NOTE,
    )


def _shadowed(host: HostFacts) -> Iterator[Finding]:
    for path in host["python"]["shadows"]:
        name = path.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]
        yield Finding(
            f"{path} shadows the module {name}",
            "rename the file, or remove its directory from PYTHONPATH",
        )


def _mpi(host: HostFacts) -> dict[str, str]:
    mpi4py = host["python"]["versions"].get("mpi4py", "missing")
    return {"mpi4py": f"{mpi4py} with {host['mpi']['source'] or 'no MPI library'}"}


def _frameworks(host: HostFacts) -> dict[str, str]:
    versions = host["python"]["versions"]
    return {name: versions[name] for name in _COMPARED if name in versions}


CHECKS = (
    Check("requirements", "python", ERROR, "the libraries that Ringdance itself needs must be installed",
          _requirements),
    Check("horovod-beside", "python", ERROR,
          "horovod must not be installed alongside ringdance-horovod, because both distributions "
          "contain the directory horovod/", _horovod),
    Check("shadowed-modules", "python", ERROR,
          "files in the working directory or PYTHONPATH, such as torch.py or random.py, must not shadow "
          "libraries", _shadowed),
    Check("user-site", "python", WARNING, "libraries in ~/.local should not shadow those in the environment",
          limit("no library in ~/.local shadows one in the environment",
                lambda host: host["python"]["user_site"],
                "export PYTHONNOUSERSITE=1",
                problem="libraries in ~/.local shadow those in the environment: {python[user_site]:names}")),
    Check("same-mpi", "python", ERROR, "all hosts must have the same mpi4py and MPI library",
          equal(_mpi, _SAME_EVERYWHERE), ("python", "mpi"), compares=True),
    Check("same-frameworks", "python", WARNING,
          "all hosts must have the same framework versions, because different versions may compute "
          "different results or name weights differently",
          equal(_frameworks, _SAME_EVERYWHERE), compares=True),
)  # fmt: skip
