"""Memory, shared memory, swap and huge pages. All sizes in bytes."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted

_SHM = "/dev/shm"


def look(wanted: Wanted) -> dict[str, Any]:
    """Totals and what is free; the cgroup's limit; /dev/shm; swap; huge pages; kills for lack of memory."""
    table = {}
    for line in files.text("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words:
            table[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    limits = files.cgroup_limits("memory", ("memory.max", "memory.limit_in_bytes"))
    kills = [
        line.split()[1] for line in files.text("/proc/vmstat").splitlines() if line.startswith("oom_kill ")
    ]
    return {
        "total": table.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available": table.get("MemAvailable"),
        "limit": min(limits, default=None),
        "swap_used": table.get("SwapTotal", 0) - table.get("SwapFree", 0),
        "huge_pages": table.get("HugePages_Total", 0) * table.get("Hugepagesize", 0),
        "huge_pages_free": table.get("HugePages_Free", 0) * table.get("Hugepagesize", 0),
        "transparent": _chosen(files.text("/sys/kernel/mm/transparent_hugepage/enabled")),
        "overcommit": files.number("/proc/sys/vm/overcommit_memory"),
        "killed": int(kills[0]) if kills else 0,
        "shm": _shared(),
    }


def _chosen(words: str) -> str:
    """``always [madvise] never`` → "madvise"."""
    return words.partition("[")[2].partition("]")[0]


def _shared() -> dict[str, Any]:
    """/dev/shm: whether it is there, size, free space, and why nothing can be written."""
    try:
        room = os.statvfs(_SHM)
    except OSError:
        return {"exists": False}
    found = {
        "exists": True,
        "total": room.f_frsize * room.f_blocks,
        "free": room.f_frsize * room.f_bavail,
        "memory": files.mounted(_SHM) == "tmpfs",
        "error": "",
    }
    try:
        with tempfile.TemporaryFile(dir=_SHM) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found
