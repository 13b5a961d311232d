"""The interpreter and what is installed, here and on the other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.compare import odd_ones
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Cases, Finding, host_check, hosts_check

_FRAMEWORKS = ("torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib")
_SAME_EVERYWHERE = (
    "install the same environment at the same place on all hosts (uv, conda-pack, a shared disk or one image)"
)


@host_check("requirements", "python", ERROR, "the libraries that Ringdance itself needs")
def requirements(case: Case) -> Finding:
    """numpy, ml_dtypes, cloudpickle, mpi4py."""
    found = case["python"]["versions"]
    missing = [name for name in ("numpy", "ml_dtypes", "cloudpickle", "mpi4py") if name not in found]
    python = case["python"]["executable"]
    if missing:
        return Finding(
            f"{', '.join(missing)} not installed for {python}",
            f"{python} -m pip install 'ringdance[openmpi]'",
        )
    return Finding(
        f"Python {case['python']['version']} ({python}), ringdance {case['python']['ringdance']}, "
        f"mpi4py {found['mpi4py']}, numpy {found['numpy']}"
    )


@host_check("framework-installed", "python", NOTE, "whether this environment has a framework")
def framework_installed(case: Case) -> Finding:
    """torch, TensorFlow, JAX."""
    found = case["python"]["versions"]
    named = [f"{name} {found[name]}" for name in _FRAMEWORKS if name in found]
    if named:
        return Finding(", ".join(named))
    return Finding(
        "no torch, TensorFlow or JAX in this environment",
        "pip install 'ringdance[torch]' (or tensorflow, keras, jax)",
    )


@host_check(
    "horovod-beside",
    "python",
    ERROR,
    "the distributions horovod and ringdance-horovod side by side: both own the folder horovod/",
)
def horovod_beside(case: Case) -> Finding | None:
    """Two owners of one folder."""
    found = case["python"]["versions"]
    if "horovod" in found and "ringdance-horovod" in found:
        return Finding(
            f"horovod {found['horovod']} and ringdance-horovod are both installed and overwrite each "
            "other's files",
            "pip uninstall -y horovod ringdance-horovod && pip install ringdance-horovod",
        )
    if "horovod" in found:
        return Finding(
            f"horovod {found['horovod']} is installed: `import horovod` is not Ringdance's",
            "pip uninstall -y horovod && pip install ringdance-horovod",
            NOTE,
        )
    return None


@host_check(
    "installed-twice",
    "python",
    WARNING,
    "a library in two places of sys.path with two versions: which one is imported depends on the order",
)
def installed_twice(case: Case) -> Iterator[Finding]:
    """The same distribution twice."""
    twice = case["python"]["twice"]
    for name, places in twice.items():
        yield Finding(
            f"{name} is installed {len(places)} times: {several(places)}",
            f"pip uninstall {name}, until `pip show {name}` says that it is gone, then install it once",
        )
    if not twice:
        yield Finding("no library is installed twice")


@host_check(
    "shadowed-modules",
    "python",
    ERROR,
    "files of the working folder or of PYTHONPATH that are imported in place of libraries: torch.py, "
    "random.py",
)
def shadowed_modules(case: Case) -> Iterator[Finding]:
    """Shadows."""
    shadows = case["python"]["shadows"]
    for path in shadows:
        name = os.path.basename(path)
        name = os.path.basename(os.path.dirname(path)) if name == "__init__.py" else name[:-3]
        yield Finding(
            f"{path} is imported in place of the module {name}",
            "give it another name, or take its folder out of PYTHONPATH",
        )
    if not shadows:
        yield Finding("nothing shadows a library")


@host_check(
    "pythonpath",
    "python",
    WARNING,
    "PYTHONPATH with folders that do not exist, or that lead to another Python's packages",
    needs=("python", "environment"),
)
def pythonpath(case: Case) -> Finding:
    """PYTHONPATH."""
    missing = case["python"]["missing_path"]
    if missing:
        return Finding(
            f"PYTHONPATH names what does not exist: {several(missing)}",
            "correct PYTHONPATH, or: unset PYTHONPATH",
        )
    version = ".".join(case["python"]["version"].split(".")[:2])
    path = case["environment"]["variables"].get("PYTHONPATH", "").split(os.pathsep)
    foreign = [p for p in path if "/python3." in p and f"/python{version}" not in p]
    if foreign:
        return Finding(
            f"PYTHONPATH holds packages of another Python than {version}: {several(foreign)}",
            "unset PYTHONPATH",
        )
    return Finding("PYTHONPATH is in order" if any(path) else "PYTHONPATH is not set")


@host_check(
    "pythonhome",
    "python",
    ERROR,
    "PYTHONHOME, which makes other interpreters load this one's standard library",
)
def pythonhome(case: Case) -> Finding:
    """PYTHONHOME."""
    home = case["python"]["home"]
    return (
        Finding(f"PYTHONHOME={home} is set", "unset PYTHONHOME") if home else Finding("PYTHONHOME is not set")
    )


@host_check("user-site", "python", WARNING, "libraries in ~/.local that are taken before the environment's")
def user_site(case: Case) -> Finding:
    """User site packages."""
    found = case["python"]["user_site"]
    if not found:
        return Finding("nothing in ~/.local comes before the environment's libraries")
    return Finding(
        f"{several(found)} in ~/.local come before those of the environment", "export PYTHONNOUSERSITE=1"
    )


@host_check(
    "conda-and-pip",
    "python",
    WARNING,
    "an active conda environment that is not this Python's, or packages that conda and pip have both "
    "installed",
)
def conda_and_pip(case: Case) -> Iterator[Finding]:
    """conda."""
    found, prefix = case["python"]["conda"], case["python"]["prefix"]
    # A virtual environment made inside a conda one is usual; another conda environment is not.
    if found["active"] and found["here"] and os.path.realpath(found["active"]) != os.path.realpath(prefix):
        yield Finding(
            f"conda's environment {found['active']} is active, but this Python is of {prefix}",
            f"conda activate {prefix}",
        )
    for name, (by_conda, by_pip) in found["both"].items():
        yield Finding(
            f"{name}: conda has installed {by_conda}, pip {by_pip} over it",
            f"pip uninstall -y {name} && conda install --force-reinstall {name}",
        )


@host_check(
    "text-encoding",
    "python",
    WARNING,
    "encoding of output: a name with an umlaut ends a rank with UnicodeEncodeError",
)
def text_encoding(case: Case) -> Finding:
    """UTF-8."""
    encoding = case["python"]["encoding"]
    if encoding.lower().replace("-", "") == "utf8":
        return Finding("output is UTF-8")
    return Finding(f"Python writes {encoding}", "unset PYTHONIOENCODING; export PYTHONUTF8=1")


@hosts_check(
    "same-python",
    "python",
    ERROR,
    "the same Python on all hosts: what one rank pickles, the others must read",
)
def same_python(cases: Cases) -> Iterator[Finding]:
    """Versions of Python."""
    yield from odd_ones(
        {h: c["python"]["version"].rpartition(".")[0] for h, c in cases.items()}, _SAME_EVERYWHERE, "Python"
    )


@hosts_check(
    "same-ringdance",
    "python",
    ERROR,
    "the same ringdance on all hosts: ranks of two versions do not understand each other",
)
def same_ringdance(cases: Cases) -> Iterator[Finding]:
    """Versions of ours."""
    version = next(iter(cases.values()))["python"]["ringdance"]
    yield from odd_ones(
        {h: c["python"]["ringdance"] for h, c in cases.items()},
        f"pip install ringdance=={version} on those hosts",
        "ringdance",
    )


@hosts_check(
    "same-mpi", "python", ERROR, "the same mpi4py and MPI library on all hosts", needs=("python", "mpi")
)
def same_mpi(cases: Cases) -> Iterator[Finding]:
    """mpi4py, and the library by its source."""
    values = {
        h: f"mpi4py {c['python']['versions'].get('mpi4py', 'missing')} with "
        f"{c['mpi']['source'] or 'no MPI library'}"
        for h, c in cases.items()
    }
    yield from odd_ones(values, _SAME_EVERYWHERE)


@hosts_check(
    "same-frameworks",
    "python",
    WARNING,
    "the same framework versions on all hosts: other versions compute other numbers, or have other "
    "names of weights",
)
def same_frameworks(cases: Cases) -> Iterator[Finding]:
    """torch, TensorFlow, Keras, JAX, numpy."""
    for name in ("numpy", *_FRAMEWORKS):
        if any(name in case["python"]["versions"] for case in cases.values()):
            values = {h: f"{name} {c['python']['versions'].get(name, '(missing)')}" for h, c in cases.items()}
            yield from odd_ones(values, _SAME_EVERYWHERE)
