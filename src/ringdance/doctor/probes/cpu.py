"""Cores: their number, and those that may be used."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.launch.system import linux
from ringdance.limits import usable_cores


def collect(usage: Usage) -> dict[str, Any]:
    """Cores (all, by affinity, usable under the quota), model."""
    lines = [line.partition(":") for line in linux.text("/proc/cpuinfo").splitlines()]
    fields = {name.strip().lower(): value.strip() for name, _, value in reversed(lines)}
    cores = psutil.cpu_count() or 1
    return {
        "cores": cores,
        "affinity": len(os.sched_getaffinity(0)) if linux.LINUX else cores,
        "usable": usable_cores(),
        "model": fields.get("model name") or platform.processor() or platform.machine(),
    }
