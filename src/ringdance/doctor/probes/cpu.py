"""Cores: how many, which of them may be used, what they can, how busy they are."""

from __future__ import annotations

import glob
import os
import platform
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted
from ringdance.launch.system import linux

_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def look(wanted: Wanted) -> dict[str, Any]:
    """Cores (all, by affinity, usable under the cgroup's quota), model, instruction sets, governors, load."""
    lines = [line.partition(":") for line in files.text("/proc/cpuinfo").splitlines()]
    fields = {name.strip().lower(): value.strip() for name, _, value in reversed(lines)}
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() or 1
    return {
        "cores": cores,
        "affinity": len(affinity(0)) if affinity else cores,
        "usable": linux.usable_cores(),
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "sets": [name for name in _SETS if name in flags],
        "governors": sorted(
            {files.text(p) for p in glob.glob("/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")} - {""}
        ),
        "nodes": len(glob.glob("/sys/devices/system/node/node[0-9]*")) or 1,
        "load": _load(),
        "steal": _steal(),
    }


def _load() -> float:
    """Processes that ran or waited for a core, average of the last minute."""
    words = files.text("/proc/loadavg").split()
    return float(words[0]) if words else os.getloadavg()[0]


def _steal() -> float:
    """Share of the cores' time since the start that other virtual machines took."""
    times = [int(word) for word in files.text("/proc/stat").partition("\n")[0].split()[1:9]]
    total = sum(times)
    return times[7] / total if len(times) == 8 and total else 0.0
