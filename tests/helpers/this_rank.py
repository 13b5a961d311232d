"""This process's place in a job of test ranks."""

from __future__ import annotations

import os


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and size in the job of mpiexec or torchrun, or (0, 1) outside of both."""
    names = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.append(("RANK", "WORLD_SIZE"))
    for rank, size in names:
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
