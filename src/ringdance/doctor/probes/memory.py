"""Memory and shared memory. All sizes in bytes."""

from __future__ import annotations

from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import disk, files


def collect(usage: Usage) -> dict[str, Any]:
    """Total and available memory, the cgroup's limit, /dev/shm."""
    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "limit": files.cgroup_limit("memory", ("memory.max", "memory.limit_in_bytes")),
        "shm": disk.directory("/dev/shm"),
    }
