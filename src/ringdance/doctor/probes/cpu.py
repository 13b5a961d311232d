"""Cores: their number, those that may be used, instruction sets."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.launch.system import linux
from ringdance.limits import usable_cores

_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def collect(usage: Usage) -> dict[str, Any]:
    """Cores (all, by affinity, usable under the quota), model, instruction sets."""
    lines = [line.partition(":") for line in linux.text("/proc/cpuinfo").splitlines()]
    fields = {name.strip().lower(): value.strip() for name, _, value in reversed(lines)}
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    cores = psutil.cpu_count() or 1
    return {
        "cores": cores,
        "affinity": len(os.sched_getaffinity(0)) if linux.LINUX else cores,
        "usable": usable_cores(),
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "sets": [name for name in _SETS if name in flags],
    }
