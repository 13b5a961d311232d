"""GPUs: those that the machine has, what the driver says of them, and libraries that use them."""

from __future__ import annotations

import glob
import os
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted

_FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.used", "compute_mode",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_thermal_slowdown",
)  # fmt: skip


def look(wanted: Wanted) -> dict[str, Any]:
    """Devices on the bus, device files, and nvidia-smi's table."""
    on_bus = [
        path
        for path in glob.glob("/sys/bus/pci/devices/*/vendor")
        if files.text(path) == "0x10de" and files.text(path[:-6] + "class").startswith("0x03")
    ]
    devices = glob.glob("/dev/nvidia[0-9]*")
    code, said, errors = files.run(
        ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"], 20
    )
    gpus = [
        dict(zip(_FIELDS, (word.strip() for word in line.split(",")), strict=False))
        for line in said.splitlines()
    ]
    found: dict[str, Any] = {
        "on_bus": len(on_bus),
        "devices": len(devices),
        "gpus": gpus if code == 0 else [],
        "smi": {"code": code, "said": files.last_line(errors or said), "missing": errors == os.strerror(2)},
        "processes": [],
        "driver_cuda": "",
    }
    if found["gpus"]:
        _, said, _ = files.run(
            ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"], 20
        )
        found["processes"] = [line.strip() for line in said.splitlines() if line.strip()]
        _, said, _ = files.run(["nvidia-smi"], 20)
        found["driver_cuda"] = said.partition("CUDA Version:")[2].strip().partition(" ")[0]
    return found
