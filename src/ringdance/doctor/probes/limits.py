"""What the system lets one process, or one user, have."""

from __future__ import annotations

import resource
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted

_NAMES = {
    "memlock": "RLIMIT_MEMLOCK", "files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC",
    "stack": "RLIMIT_STACK", "core": "RLIMIT_CORE", "address": "RLIMIT_AS", "file_size": "RLIMIT_FSIZE",
    "cpu_time": "RLIMIT_CPU",
}  # fmt: skip


def look(wanted: Wanted) -> dict[str, Any]:
    """Soft and hard limits (None for none), where core dumps go, the cgroup's limit of processes."""
    found: dict[str, Any] = {}
    for name, constant in _NAMES.items():
        if hasattr(resource, constant):
            pair = resource.getrlimit(getattr(resource, constant))
            found[name] = [None if value == resource.RLIM_INFINITY else value for value in pair]
    found["core_pattern"] = files.text("/proc/sys/kernel/core_pattern")
    found["pids_limit"] = min(files.cgroup_limits("pids", ("pids.max",)), default=None)
    return found
