"""Slurm and the ways in which it starts MPI programs."""

from __future__ import annotations

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.registry import ERROR, WARNING, Case, Finding, host_check

_KIND = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}


@host_check(
    "slurm-mpi",
    "mpi",
    WARNING,
    "Slurm's plugin for the MPI library: pmix for Open MPI, pmi2 for MPICH; without it srun starts N "
    "worlds of size 1",
    needs=("slurm", "mpi"),
)
def slurm_mpi(case: Case) -> Finding | None:
    """``srun --mpi=list``."""
    found, family = case["slurm"], case["mpi"]["family"]
    # An srun that lists nothing belongs to no cluster: its commands are only installed.
    if not found["kinds"] or not family:
        return None
    need = _KIND[family]
    offered = [kind for kind in found["kinds"] if kind.startswith(need)]
    if not offered:
        return Finding(
            f"srun offers {several(found['kinds'])}, but {family} needs --mpi={need}",
            "start with mpiexec inside salloc or sbatch (`ringdance run` does), or install Slurm's "
            "PMIx plugin",
        )
    default = found["default"]
    if default and not default.startswith(need):
        return Finding(
            f"SLURM_MPI_TYPE={default}, but {family} needs {need}", f"export SLURM_MPI_TYPE={offered[0]}"
        )
    return Finding(f"srun --mpi={offered[0]} fits {family}")


@host_check(
    "slurm-worlds",
    "mpi",
    ERROR,
    "a task of srun that has no connection to the others: N worlds of size 1",
    needs=("slurm", "mpi"),
)
def slurm_worlds(case: Case) -> Finding | None:
    """Inside a step with several tasks."""
    found = case["slurm"]
    if found["tasks"] < 2:
        return None
    if found["connected"]:
        return Finding(f"a task of {found['tasks']}, connected to the others")
    kind = _KIND.get(case["mpi"]["family"], "pmix")
    return Finding(
        f"srun started {found['tasks']} tasks without a connection: each would be a world of size 1",
        f"srun --mpi={kind} ...",
    )
