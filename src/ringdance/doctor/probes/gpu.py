"""GPUs of the machine, and the driver's table of them."""

from __future__ import annotations

import glob
import os
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.launch.system import linux

_FIELDS = {
    "index": "index", "name": "name", "driver": "driver_version", "total": "memory.total",
    "used": "memory.used", "mode": "compute_mode",
}  # fmt: skip
_PROCESSES = ("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")


def collect(usage: Usage) -> dict[str, Any]:
    """GPUs on the bus, device files, and nvidia-smi's table: memory in MiB, all values as text."""
    on_bus = [
        path
        for path in glob.glob("/sys/bus/pci/devices/*/vendor")
        if linux.text(path) == "0x10de" and linux.text(path[:-6] + "class").startswith("0x03")
    ]
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]
    code, output, errors = files.run(query)
    rows = [map(str.strip, line.split(",")) for line in output.splitlines()] if code == 0 else []
    gpus = [dict(zip(_FIELDS, row, strict=False)) for row in rows]
    found: dict[str, Any] = {
        "on_bus": len(on_bus),
        "devices": len(glob.glob("/dev/nvidia[0-9]*")),
        "gpus": gpus,
        "count": len(gpus),
        "smi": {
            "code": code, "output": files.last_line(errors or output), "missing": errors == os.strerror(2)
        },
        "processes": [],
        "cuda": "",
    }  # fmt: skip
    if gpus:
        processes = files.run(["nvidia-smi", *_PROCESSES])[1]
        found["processes"] = [line.strip() for line in processes.splitlines() if line.strip()]
        table = files.run(["nvidia-smi"])[1]
        found["cuda"] = table.partition("CUDA Version:")[2].strip().partition(" ")[0]
    return found
