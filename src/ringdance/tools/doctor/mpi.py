"""Check the MPI library that mpi4py loads and its mpiexec, and run a test job with two ranks."""

from __future__ import annotations

import glob
import os
import shlex
import sys
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.system import linux
from ringdance.launch.hosts import Host as JobHost
from ringdance.launch.mpi.library import find_mpi, mpi4py_variants
from ringdance.launch.mpi.options import MpiexecRequest, mpiexec_options
from ringdance.tools.doctor.check import ERROR, Check, Finding, HostFacts, Usage, last_line, limit
from ringdance.tools.doctor.machine import MPI_LIBRARIES, MPI_PREFIXES

# Each rank calls os.write only once, so that the output of the two ranks is not interleaved.
_RANK = "import os; from mpi4py import MPI; os.write(1, f'size={MPI.COMM_WORLD.Get_size()}\\n'.encode())"
_LIMIT_S = 60.0

# --- facts -----------------------------------------------------------------------------------------


def mpi_facts(usage: Usage) -> dict[str, Any]:
    """Collect facts about the MPI library, its mpiexec, and other MPI libraries on LD_LIBRARY_PATH."""
    facts: dict[str, Any] = {"family": "", "mpiexec": "", "source": "", "error": "", "fix": ""}
    try:
        mpi = find_mpi()
        facts |= {"family": mpi.family, "mpiexec": mpi.mpiexec, "source": mpi.source}
    except LaunchError as error:
        facts |= {"error": error.problem, "fix": error.fix}
    facts["prefix"] = prefix = os.path.dirname(os.path.dirname(facts["mpiexec"]))
    facts["other_libraries"] = [
        library
        for directory in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
        for library in sorted(glob.glob(f"{glob.escape(directory)}/libmpi.so*"))
        if not prefix or not library.startswith(f"{prefix}/")
    ]
    facts["mpi4py"] = mpi4py_variants()
    return facts


def world_facts(usage: Usage) -> dict[str, Any]:
    """Run two ranks. Collect the world sizes they report, the exit code, the last error and the command."""
    try:
        mpi = find_mpi()
    except LaunchError as error:
        return {"failed": str(error)}
    hosts = [JobHost("localhost", 2, (0, 1), local=True)]
    options, variables = mpiexec_options(MpiexecRequest(mpi, hosts, root=os.getuid() == 0))
    words = [mpi.mpiexec, *options, "-n", "2", sys.executable, "-P", "-c", _RANK]
    code, output, errors = linux.run(words, _LIMIT_S, {**variables, **os.environ})
    sizes = [int(line[5:]) for line in output.splitlines() if line.startswith("size=") and line[5:].isdigit()]
    return {"sizes": sizes, "code": code, "errors": last_line(errors), "line": shlex.join(words)}


# --- checks ----------------------------------------------------------------------------------------


def _library(host: HostFacts) -> Finding:
    facts = host["mpi"]
    overrides = [name for name in MPI_LIBRARIES if host.variable(name)]
    if not facts["error"]:
        return Finding(f"{facts['family']} ({facts['source']}), {facts['mpiexec']}")
    if overrides:
        words = ", ".join(f"{name}={host.variable(name)}" for name in overrides)
        return Finding(f"{facts['error']}, as {words} requires", "unset " + " ".join(overrides))
    if facts["mpi4py"] == ["own"]:
        return Finding(
            f"{facts['error']}: mpi4py was compiled for an MPI library that is not installed here",
            "pip install --force-reinstall --no-cache-dir --only-binary=:all: mpi4py",
        )
    return Finding(facts["error"], facts["fix"])


def _prefix(host: HostFacts) -> Finding | None:
    prefix = host["mpi"]["prefix"]
    odd = [name for name in MPI_PREFIXES if host.variable(name).rstrip("/") not in ("", prefix)]
    if host["mpi"]["family"] != "openmpi" or not odd:
        return None
    text = f"{odd[0]}={host.variable(odd[0])}, but Open MPI is installed in {prefix}"
    return Finding(text, "unset " + " ".join(odd))


def _world(host: HostFacts) -> Finding:
    world = host["world"]
    if world["sizes"] == [2, 2]:
        return Finding("two ranks started by mpiexec form one world")
    if world["sizes"] and set(world["sizes"]) == {1}:
        return Finding(
            "two ranks started by mpiexec form two worlds of size 1: mpiexec does not belong to the MPI "
            "library that mpi4py loads",
            "ringdance doctor --check mpi-library --check second-mpi-loaded",
        )
    return Finding(
        f"two ranks could not be started: {world['errors'] or 'exit code ' + str(world['code'])}",
        f"see the full output of: {world['line']}",
    )


CHECKS = (
    Check("mpi-library", "mpi", ERROR,
          "mpi4py must find an MPI library, and the library's mpiexec must be installed",
          _library, ("mpi", "environment")),
    Check("second-mpi-loaded", "mpi", ERROR,
          "LD_LIBRARY_PATH must not contain another MPI library, because programs load it instead of "
          "the one in the environment", limit("LD_LIBRARY_PATH contains no other MPI library",
                lambda host: host["mpi"]["other_libraries"],
                "unset LD_LIBRARY_PATH (or `module unload` the module that set it)",
                problem="LD_LIBRARY_PATH contains another MPI library: {mpi[other_libraries]:names}")),
    Check("mpi-prefix", "mpi", ERROR,
          "OPAL_PREFIX and similar variables must not make Open MPI look for its files in another directory",
          _prefix, ("mpi", "environment")),
    Check("world", "mpi", ERROR, "a job of two ranks must form one world of two, not two worlds of one",
          _world, ("world",)),
)  # fmt: skip
