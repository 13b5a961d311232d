"""Limits of one process or one user."""

from __future__ import annotations

import resource
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files

_NAMES = {
    "memlock": "RLIMIT_MEMLOCK", "files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC",
    "address": "RLIMIT_AS",
}  # fmt: skip


def collect(usage: Usage) -> dict[str, Any]:
    """Soft and hard limits (None for none), and the cgroup's limit of processes."""
    found: dict[str, Any] = {}
    for name, constant in _NAMES.items():
        pair = resource.getrlimit(getattr(resource, constant))
        found[name] = [None if value == resource.RLIM_INFINITY else value for value in pair]
    found["pids_limit"] = files.cgroup_limit("pids", ("pids.max",))
    return found
