"""The interpreter and what is installed, here and on the other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ringdance.doctor.check import ERROR, NOTE, WARNING, Check, Finding, Host
from ringdance.doctor.rows import equal, limit, several

_REQUIRED = ("numpy", "ml_dtypes", "cloudpickle", "mpi4py", "psutil", "rich")
_COMPAT = "in a clone of Ringdance: pip install ./compat/horovod"
_COMPARED = ("numpy", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib")
_SAME_EVERYWHERE = (
    "install the same environment under the same path on all hosts (uv, conda-pack, a shared disk, one image)"
)


def _requirements(host: Host) -> Finding:
    found = host["python"]
    python, versions = found["executable"], found["versions"]
    missing = [name for name in _REQUIRED if name not in versions]
    if missing:
        fix = f"{python} -m pip install {' '.join(missing)}"
        return Finding(f"{', '.join(missing)} not installed for {python}", fix)
    return Finding(
        f"Python {found['version']} ({python}), ringdance {found['ringdance']}, "
        f"mpi4py {versions['mpi4py']}, numpy {versions['numpy']}"
    )


def _horovod(host: Host) -> Finding | None:
    found = host["python"]["versions"]
    if "horovod" not in found:
        return None
    if "ringdance-horovod" in found:
        return Finding(
            f"horovod {found['horovod']} and ringdance-horovod are both installed and overwrite each "
            "other's files",
            f"pip uninstall -y horovod ringdance-horovod, then {_COMPAT}",
        )
    return Finding(
        f"horovod {found['horovod']} is installed: `import horovod` is not Ringdance's",
        f"pip uninstall -y horovod, then {_COMPAT}",
        NOTE,
    )


def _shadows(host: Host) -> Iterator[Finding]:
    for path in host["python"]["shadows"]:
        name = path.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]
        yield Finding(
            f"{path} is imported in place of the module {name}",
            "give it another name, or take its directory out of PYTHONPATH",
        )


def _pythonpath(host: Host) -> Finding:
    missing = host["python"]["missing_path"]
    if missing:
        return Finding(f"PYTHONPATH names what does not exist: {several(missing)}", "unset PYTHONPATH")
    version = ".".join(host["python"]["version"].split(".")[:2])
    path = host.variable("PYTHONPATH")
    foreign = [p for p in path.split(os.pathsep) if "/python3." in p and f"/python{version}" not in p]
    if foreign:
        text = f"PYTHONPATH holds packages of another Python than {version}: {several(foreign)}"
        return Finding(text, "unset PYTHONPATH")
    return Finding(f"PYTHONPATH={path}" if path else "PYTHONPATH is not set")


def _mpi(host: Host) -> dict[str, str]:
    mpi4py = host["python"]["versions"].get("mpi4py", "missing")
    return {"mpi4py": f"{mpi4py} with {host['mpi']['source'] or 'no MPI library'}"}


def _frameworks(host: Host) -> dict[str, str]:
    found = host["python"]["versions"]
    return {name: found[name] for name in _COMPARED if name in found}


CHECKS = (
    Check("requirements", "python", ERROR, "the libraries that Ringdance itself needs", _requirements),
    Check("horovod-beside", "python", ERROR,
          "the distributions horovod and ringdance-horovod side by side: both own the directory horovod/",
          _horovod),
    Check("shadowed-modules", "python", ERROR,
          "files of the working directory or of PYTHONPATH that are imported in place of libraries: "
          "torch.py, random.py", _shadows),
    Check("pythonpath", "python", WARNING,
          "PYTHONPATH with directories that do not exist, or that lead to another Python's packages",
          _pythonpath, ("python", "environment")),
    Check("user-site", "python", WARNING, "libraries in ~/.local that hide the environment's",
          limit("nothing in ~/.local comes before the environment's libraries",
                lambda host: host["python"]["user_site"],
                "export PYTHONNOUSERSITE=1",
                problem="{python[user_site]!l} in ~/.local come before those of the environment")),
    Check("conda-environment", "python", WARNING, "an active conda environment that is not this Python's",
          limit("conda's environment {python[conda]} is active",
                lambda host: host["python"]["conda"] != host["python"]["conda_here"],
                "conda activate {python[conda_here]}",
                problem="conda's environment {python[conda]} is active, but this Python is of "
                        "{python[conda_here]}",
                applies=lambda host: host["python"]["conda"] and host["python"]["conda_here"])),
    Check("same-mpi", "python", ERROR, "the same mpi4py and MPI library on all hosts",
          equal(_mpi, _SAME_EVERYWHERE), ("python", "mpi"), compares=True),
    Check("same-frameworks", "python", WARNING,
          "the same framework versions on all hosts: other versions compute other numbers, or have other "
          "names of weights", equal(_frameworks, _SAME_EVERYWHERE), compares=True),
)  # fmt: skip
