"""The MPI library and its launchers."""

from __future__ import annotations

from ringdance.doctor.check import ERROR, Check, Finding, Host
from ringdance.doctor.rows import limit


def _library(host: Host) -> Finding:
    found = host["mpi"]
    overrides = [name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if host.variable(name)]
    if not found["error"]:
        return Finding(f"{found['family']} ({found['source']}), {found['mpiexec']}")
    text, _, fix = found["error"].partition(". Install an MPI library into this environment: ")
    if overrides:
        words = ", ".join(f"{name}={host.variable(name)}" for name in overrides)
        return Finding(f"{text}, as {words} requires", "unset " + " ".join(overrides))
    if found["mpi4py"] == ["own"]:
        return Finding(
            f"{text}: it was compiled for an MPI library that is not installed here",
            "pip install --force-reinstall --no-cache-dir --only-binary=:all: mpi4py",
        )
    return Finding(text, fix)


def _prefix(host: Host) -> Finding | None:
    prefix, names = host["mpi"]["prefix"], ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")
    odd = [name for name in names if host.variable(name).rstrip("/") not in ("", prefix)]
    if host["mpi"]["family"] != "openmpi" or not odd:
        return None
    text = f"{odd[0]}={host.variable(odd[0])}, but Open MPI is in {prefix}"
    return Finding(text, "unset " + " ".join(odd))


def _world(host: Host) -> Finding:
    found = host["world"]
    if found["sizes"] == [2, 2]:
        return Finding("two ranks started by mpiexec are one world")
    if found["sizes"] and set(found["sizes"]) == {1}:
        return Finding(
            "two ranks started by mpiexec are two worlds of size 1: mpiexec and the library do not "
            "belong together",
            "ringdance doctor --check mpi-library --check second-mpi-loaded",
        )
    return Finding(
        f"two ranks could not be started: {found['errors'] or 'exit code ' + str(found['code'])}",
        f"see its whole output: {found['line']}",
    )


CHECKS = (
    Check("mpi-library", "mpi", ERROR,
          "the MPI library that mpi4py loads, and the mpiexec that belongs to it",
          _library, ("mpi", "environment")),
    Check("mpiexec-works", "mpi", ERROR,
          "whether the mpiexec that belongs to the library can be started at all",
          limit("{mpi[version][path]} works", lambda host: host["mpi"]["version"]["code"],
                "{mpi[reinstall]}",
                problem="{mpi[version][path]} --version ends with exit code {mpi[version][code]}: "
                        "{mpi[version][output]}",
                applies=lambda host: host["mpi"]["version"])),
    Check("second-mpi-loaded", "mpi", ERROR,
          "LD_LIBRARY_PATH with another MPI library, which programs load in place of the environment's",
          limit("LD_LIBRARY_PATH leads to no other MPI library",
                lambda host: host["mpi"]["other_libraries"],
                "unset LD_LIBRARY_PATH (or `module unload` what set it)",
                problem="LD_LIBRARY_PATH leads to another MPI library: {mpi[other_libraries]!l}")),
    Check("mpi-prefix", "mpi", ERROR,
          "OPAL_PREFIX and its like, which make Open MPI look for its files in another directory",
          _prefix, ("mpi", "environment")),
    Check("world", "mpi", ERROR,
          "two ranks that are really started: whether they are one world of two, or two worlds of one",
          _world, ("world",)),
)  # fmt: skip
