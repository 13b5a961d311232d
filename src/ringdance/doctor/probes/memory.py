"""Memory, shared memory and swap. All sizes in bytes."""

from __future__ import annotations

import os
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import disk, files


def collect(usage: Usage) -> dict[str, Any]:
    """Total and available memory, the cgroup's limit, swap, /dev/shm, processes killed for lack of memory."""
    memory = psutil.virtual_memory()
    kills = [line for line in files.text("/proc/vmstat").splitlines() if line.startswith("oom_kill ")]
    limits = files.cgroup_limits("memory", ("memory.max", "memory.limit_in_bytes"))
    return {
        "total": memory.total,
        "available": memory.available,
        "limit": min(limits, default=None),
        "swap_used": psutil.swap_memory().used,
        "killed": int(kills[0].split()[1]) if kills else 0,
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
