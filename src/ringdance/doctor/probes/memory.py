"""Memory, shared memory and swap. All sizes in bytes."""

from __future__ import annotations

import os
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import disk, files


def collect(usage: Usage) -> dict[str, Any]:
    """Total and available memory, the cgroup's limit, swap, /dev/shm."""
    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "limit": files.cgroup_limit("memory", ("memory.max", "memory.limit_in_bytes")),
        "swap_used": psutil.swap_memory().used,
        "shm": _shared(),
    }


def _shared() -> dict[str, Any]:
    """Describe /dev/shm: whether it exists and is in memory, size, free space, why it cannot be written."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return {"exists": False}
    return {
        "exists": True,
        "total": room.f_frsize * room.f_blocks,
        "free": room.f_frsize * room.f_bavail,
        "memory": disk.mounted("/dev/shm") == "tmpfs",
        "error": files.write_error("/dev/shm"),
    }
