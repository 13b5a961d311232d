"""GPUs of the machine, and the driver's table of them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.launch.system import linux

_FIELDS = {
    "uuid": "uuid", "index": "index", "name": "name", "driver": "driver_version", "total": "memory.total",
    "used": "memory.used", "mode": "compute_mode",
}  # fmt: skip
_REMAPPED = {
    "uuid": "gpu_uuid", "remapping": "remapped_rows.pending", "remap_failure": "remapped_rows.failure",
}  # fmt: skip
_OTHER = {
    "processes": ["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"],
    "peers": ["topo", "-p2p", "r"], "links": ["nvlink", "--status"], "cuda": [],
}  # fmt: skip


def collect(usage: Usage) -> dict[str, Any]:
    """GPUs on the bus, device files, and nvidia-smi's table: memory in MiB, all values as text."""
    on_bus = [
        path
        for path in glob.glob("/sys/bus/pci/devices/*/vendor")
        if linux.text(path) == "0x10de" and linux.text(path[:-6] + "class").startswith("0x03")
    ]
    (code, output, errors), gpus = _table(_FIELDS)
    found: dict[str, Any] = {
        "on_bus": len(on_bus),
        "devices": len(glob.glob("/dev/nvidia[0-9]*")),
        "gpus": [dict.fromkeys(_REMAPPED, "") | gpu for gpu in gpus],
        "count": len(gpus),
        "smi": {
            "code": code, "output": files.last_line(errors or output), "missing": errors == os.strerror(2)
        },
        "processes": [],
        "peers": None,
        "direct": _direct(),
        "cuda": "",
    }  # fmt: skip
    if gpus:
        _add_details(found)
    return found


def _table(fields: Mapping[str, str]) -> tuple[tuple[int, str, str], list[dict[str, Any]]]:
    """Return what nvidia-smi says, and its table: the fields of each GPU."""
    what = "remapped-rows" if "gpu_uuid" in fields.values() else "gpu"
    query = f"--query-{what}={','.join(fields.values())}"
    answer = files.run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    lines = answer[1].splitlines() if answer[0] == 0 else []
    return answer, [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in lines]


def _add_details(found: dict[str, Any]) -> None:
    """Ask for the rest, all at once: without persistence mode each program loads the driver anew."""
    with ThreadPoolExecutor(1 + len(_OTHER)) as pool:
        remapped = pool.submit(_table, _REMAPPED)
        outputs = pool.map(lambda words: files.run(["nvidia-smi", *words])[1], _OTHER.values())
    other = dict(zip(_OTHER, outputs, strict=True))
    gpus = {gpu["uuid"]: gpu for gpu in found["gpus"]}
    for row in remapped.result()[1]:
        gpus.get(row["uuid"], {}).update(row)
    links = re.split(r"^GPU (\d+):.*$", other["links"], flags=re.MULTILINE)[1:]
    for gpu in found["gpus"]:
        gpu["nvlinks"] = dict(zip(links[::2], links[1::2], strict=True)).get(gpu["index"], "").count("GB/s")
    matrix = re.findall(r"^\s*GPU(\d+)(\s.*\bX\b.*)$", other["peers"], re.MULTILINE)
    pairs = [(int(row), n, word) for row, words in matrix for n, word in enumerate(words.split())]
    if pairs:
        found["peers"] = [f"GPU{a}-GPU{b} {word}" for a, b, word in pairs if a < b and word != "OK"]
    found["processes"] = [line.strip() for line in other["processes"].splitlines() if line.strip()]
    found["cuda"] = other["cuda"].partition("CUDA Version:")[2].strip().partition(" ")[0]


def _direct() -> list[str]:
    """Return what lets a network device read and write memory of GPUs (GPUDirect RDMA)."""
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if os.path.isdir(f"/sys/module/{name}")]
    kernel = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    opened = "Open Kernel Module" in linux.text("/proc/driver/nvidia/version")
    return [*modules, *(["dma-buf"] if opened and kernel >= (5, 12) else [])]
