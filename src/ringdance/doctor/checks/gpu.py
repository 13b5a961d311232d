"""GPUs, their driver, and whether frameworks can be imported and use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host
from ringdance.doctor.rows import equal, limit, several


def _driver(host: Host) -> Finding | None:
    found, smi = host["gpu"], host["gpu"]["smi"]
    if found["count"]:
        first = found["gpus"][0]
        text = f"{found['count']} x {first['name']}, driver {first['driver']}"
        if found["on_bus"] <= found["count"]:
            return Finding(text)
        return Finding(
            f"{text}; but {found['on_bus']} GPUs are on the bus",
            "see what the driver reports: sudo dmesg | grep -iE 'nvrm|xid'",
        )
    present = max(found["on_bus"], found["devices"])
    if smi["missing"] and present:
        return Finding(
            f"{present} GPUs, but no nvidia-smi",
            "install the NVIDIA driver (in a container: docker run --gpus all; Kubernetes: resources.limits "
            "nvidia.com/gpu)",
        )
    if smi["missing"] or smi["code"] == 0:
        return None
    return Finding(
        f"nvidia-smi fails: {smi['output'] or 'exit code ' + str(smi['code'])}",
        "sudo reboot (the driver was updated while it was loaded)"
        if "mismatch" in smi["output"].lower()
        else "reinstall the driver, then check again: nvidia-smi",
    )


def _each(
    wrong: Callable[[Host, Mapping[str, Any]], bool], text: str, fix: str
) -> Callable[[Host], Iterator[Finding]]:
    """Judge each GPU; `text` and `fix` may hold its fields; GPUs with equal ones are named together."""

    def judge(host: Host) -> Iterator[Finding]:
        found: dict[tuple[str, str], list[str]] = {}
        for gpu in host["gpu"]["gpus"]:
            if wrong(host, gpu):
                key = (text.format_map({**gpu, "index": "{}"}), fix.format_map({**gpu, "index": "{}"}))
                found.setdefault(key, []).append(gpu["index"])
        for key, numbers in found.items():
            yield Finding(key[0].format(",".join(numbers)), key[1].format(",".join(numbers)))

    return judge


def _refuses(host: Host, gpu: Mapping[str, Any]) -> bool:
    shared = host.slots > host["gpu"]["count"] or host["gpu"]["processes"]
    return gpu["mode"] == "Prohibited" or bool(gpu["mode"].startswith("Exclusive") and shared)


def _memory(host: Host) -> Iterator[Finding]:
    for gpu in host["gpu"]["gpus"]:
        used, total = gpu["used"], gpu["total"]
        if used.isdigit() and total.isdigit():
            users = several(host["gpu"]["processes"], 3)
            fix = "end its processes: nvidia-smi --query-compute-apps=pid --format=csv,noheader"
            yield Finding(
                f"GPU {gpu['index']}: {used} of {total} MiB are in use" + (f" ({users})" if users else ""),
                fix if int(used) > int(total) // 10 else "",
            )


def _framework_gpus(host: Host) -> Iterator[Finding]:
    cuda = host["gpu"]["cuda"]
    for name, found in host["frameworks"]["of"].items():
        if not host["gpu"]["count"] or "error" in found:
            continue
        text = f"{name} {found['version']} sees {found['sees']} GPUs"
        if found["sees"]:
            yield Finding(text)
        elif found.get("cuda"):
            yield Finding(
                f"{text}; it is built for CUDA {found['cuda']}, the driver is for {cuda}",
                "update the driver, or install a build for this driver's CUDA",
            )
        else:
            fix = f"pip uninstall {name}, then install its build for CUDA {cuda.partition('.')[0]}"
            yield Finding(f"{text}: a build for CPUs", fix)


def _imports(host: Host) -> Iterator[Finding]:
    for name, found in host["frameworks"]["of"].items():
        if "error" in found:
            yield Finding(f"import {name} fails: {found['error']}", f"pip install --force-reinstall {name}")
        else:
            yield Finding(f"{name} {found['version']} can be imported")


def _kind(host: Host) -> dict[str, str]:
    gpus = host["gpu"]["gpus"]
    return {"GPUs:": f"{len(gpus)} x {gpus[0]['name']}" if gpus else "none"}


def _versions(host: Host) -> dict[str, str]:
    gpus = host["gpu"]["gpus"]
    nccl = [text for name, text in host["python"]["versions"].items() if name.startswith("nvidia-nccl")]
    return {"driver": gpus[0]["driver"], "NCCL": "/".join(nccl) or "(no wheel)"} if gpus else {}


CHECKS = (
    Check("gpu-driver", "gpu", ERROR,
          "whether the driver answers for the GPUs that the machine has", _driver),
    Check("gpu-ranks", "gpu", WARNING, "ranks and GPUs of a host",
          limit("{slots} ranks on {gpu[count]} GPUs",
                lambda host: host.slots > host["gpu"]["count"],
                "start {gpu[count]} ranks on this host, one for each GPU",
                applies=lambda host: host.slots and host["gpu"]["count"])),
    Check("gpu-compute-mode", "gpu", ERROR,
          "compute mode: exclusive GPUs refuse a second process, prohibited ones all",
          _each(_refuses, "GPU {index} is in compute mode {mode}", "sudo nvidia-smi -i {index} -c DEFAULT")),
    Check("gpu-memory", "gpu", WARNING,
          "memory of GPUs that is in use: often by processes of an earlier job", _memory),
    Check("gpu-framework", "gpu", ERROR, "frameworks without GPU support on a machine that has GPUs",
          _framework_gpus, ("gpu", "frameworks")),
    Check("framework-imports", "frameworks", ERROR,
          "whether installed frameworks can be imported at all", _imports),
    Check("same-gpus", "gpu", WARNING, "GPUs of the hosts: kind and number",
          equal(_kind, "give hosts with fewer GPUs fewer slots, or leave them out (-H)"), compares=True),
    Check("same-driver", "gpu", WARNING, "driver and NCCL of the hosts: NCCL's versions must be the same",
          equal(_versions,
                "install the same driver and the same nvidia-nccl-cu12 (or cu13) on all hosts",
                {"NCCL": ERROR}), ("gpu", "python"), compares=True),
)  # fmt: skip
