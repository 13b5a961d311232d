"""Slurm: what `srun --mpi=list` offers, inside an allocation or beside one."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted


def look(wanted: Wanted) -> dict[str, Any]:
    """Whether srun is there, and its kinds of MPI."""
    path = shutil.which("srun") or ""
    kinds: list[str] = []
    if path:
        _, said, errors = files.run([path, "--mpi=list"], 10)
        kinds = sorted(set(re.findall(r"\b(none|cray_shasta|openmpi|pmi2|pmix(?:_v\d+)?)\b", said + errors)))
    # Inside a task of srun: the variables of a rank are then this task's own.
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "") if "SLURM_PROCID" in os.environ else ""
    return {
        "srun": path,
        "kinds": kinds,
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "default": os.environ.get("SLURM_MPI_TYPE", ""),
        "tasks": int(tasks) if tasks.isdigit() else 0,
        "connected": any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD")),
    }
