"""GPUs and their libraries."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.compare import odd_ones
from ringdance.doctor.registry import ERROR, WARNING, Case, Cases, Finding, host_check, hosts_check


def _count(case: Case) -> int:
    return len(case["gpu"]["gpus"])


@host_check("gpu-driver", "gpu", ERROR, "whether the driver answers for the GPUs that the machine has")
def driver(case: Case) -> Finding | None:
    """nvidia-smi."""
    found = case["gpu"]
    there = max(found["on_bus"], found["devices"])
    if found["gpus"]:
        first = found["gpus"][0]
        text = f"{_count(case)} x {first['name']}, driver {first['driver_version']}"
        if found["on_bus"] > _count(case):
            return Finding(
                f"{text}; but {found['on_bus']} GPUs are on the bus",
                "see what the driver says: sudo dmesg | grep -iE 'nvrm|xid'",
            )
        return Finding(text)
    smi = found["smi"]
    if smi["missing"]:
        return (
            Finding(
                f"{there} GPUs, but no nvidia-smi",
                "install the NVIDIA driver (in a container: docker run --gpus all)",
            )
            if there
            else None
        )
    if smi["code"] == 0:
        return None
    mismatch = "mismatch" in smi["said"].lower()
    return Finding(
        f"nvidia-smi fails: {smi['said'] or 'exit code ' + str(smi['code'])}",
        "sudo reboot (the driver was updated while it was loaded)"
        if mismatch
        else "reinstall the driver, then look again: nvidia-smi",
    )


@host_check(
    "gpu-device-files",
    "gpu",
    ERROR,
    "device files of the GPUs: a container without them sees none",
    needs=("gpu",),
)
def device_files(case: Case) -> Finding | None:
    """/dev/nvidia0."""
    found = case["gpu"]
    if found["on_bus"] and not found["devices"]:
        return Finding(
            f"{found['on_bus']} GPUs on the bus, but no /dev/nvidia0",
            "docker run --gpus all (Kubernetes: resources.limits nvidia.com/gpu); on a host: sudo "
            "nvidia-modprobe -u -c=0",
        )
    return None


@host_check("gpu-ranks", "gpu", WARNING, "ranks and GPUs of a host", needs=("gpu",))
def ranks(case: Case) -> Finding | None:
    """Slots and GPUs."""
    count = _count(case)
    if not count or not case.slots:
        return None
    text = f"{case.slots} ranks on {count} GPUs"
    return (
        Finding(text, f"start {count} ranks on this host, one for each GPU")
        if case.slots > count
        else Finding(text)
    )


@host_check(
    "gpu-compute-mode",
    "gpu",
    ERROR,
    "compute mode: exclusive GPUs refuse a second process, prohibited ones all",
)
def compute_mode(case: Case) -> Iterator[Finding]:
    """Exclusive_Process."""
    for gpu in case["gpu"]["gpus"]:
        mode = gpu["compute_mode"]
        shared = case.slots > _count(case) or case["gpu"]["processes"]
        if mode == "Prohibited" or (mode.startswith("Exclusive") and shared):
            yield Finding(
                f"GPU {gpu['index']} is in compute mode {mode}",
                f"sudo nvidia-smi -i {gpu['index']} -c DEFAULT",
            )


@host_check(
    "gpu-memory", "gpu", WARNING, "memory of GPUs that others hold: often processes of an earlier job"
)
def memory(case: Case) -> Iterator[Finding]:
    """Memory in use."""
    for gpu in case["gpu"]["gpus"]:
        used, total = gpu["memory.used"], gpu["memory.total"]
        if used.isdigit() and total.isdigit():
            text = f"GPU {gpu['index']}: {used} of {total} MiB are in use"
            who = several(case["gpu"]["processes"], 3)
            yield Finding(
                text + (f" ({who})" if who else ""),
                "end who holds it: nvidia-smi --query-compute-apps=pid --format=csv,noheader"
                if int(used) > int(total) // 10
                else "",
            )


@host_check(
    "gpu-errors", "gpu", ERROR, "memory errors that a GPU could not correct: results are wrong or ranks die"
)
def errors(case: Case) -> Iterator[Finding]:
    """ECC."""
    for gpu in case["gpu"]["gpus"]:
        count = gpu["ecc.errors.uncorrected.volatile.total"]
        if count.isdigit() and int(count):
            yield Finding(
                f"GPU {gpu['index']} has had {count} memory errors that it could not correct",
                f"leave this host out, and have the GPU changed: nvidia-smi -i {gpu['index']} -q -d ECC",
            )


@host_check("gpu-throttled", "gpu", WARNING, "GPUs that slow down because they are hot")
def throttled(case: Case) -> Iterator[Finding]:
    """Thermal slowdown."""
    for gpu in case["gpu"]["gpus"]:
        if gpu["clocks_throttle_reasons.hw_thermal_slowdown"] == "Active":
            yield Finding(
                f"GPU {gpu['index']} is slowed down because it is hot",
                "check the fans and the room: nvidia-smi -q -d TEMPERATURE",
            )


@host_check(
    "gpu-framework",
    "gpu",
    ERROR,
    "frameworks without GPU support on a machine that has GPUs",
    needs=("gpu", "frameworks"),
)
def framework(case: Case) -> Iterator[Finding]:
    """CPU builds, and CUDA that the driver is too old for."""
    if not _count(case):
        return
    for name, found in case["frameworks"]["of"].items():
        if "error" in found:
            continue
        text = f"{name} {found['version']} sees {found['sees']} GPUs"
        if found["sees"]:
            yield Finding(text)
        elif found.get("cuda"):
            yield Finding(
                f"{text}; it is built for CUDA {found['cuda']}, the driver is for "
                f"{case['gpu']['driver_cuda']}",
                "update the driver, or install a build for this driver's CUDA",
            )
        else:
            yield Finding(
                f"{text}: a build for CPUs",
                f"pip uninstall {name}, then install its build for CUDA "
                f"{case['gpu']['driver_cuda'].partition('.')[0]}",
            )


@host_check("framework-imports", "frameworks", ERROR, "whether installed frameworks can be imported at all")
def framework_imports(case: Case) -> Iterator[Finding]:
    """Broken installations."""
    for name, found in case["frameworks"]["of"].items():
        if "error" in found:
            yield Finding(f"import {name} fails: {found['error']}", f"pip install --force-reinstall {name}")
        else:
            yield Finding(f"{name} {found['version']} can be imported")


@host_check(
    "framework-instruction-sets",
    "frameworks",
    WARNING,
    "the instruction set that torch has chosen, compared with what the processor has",
    needs=("frameworks", "cpu"),
)
def framework_sets(case: Case) -> Finding | None:
    """torch's CPU capability."""
    found = case["frameworks"]["of"].get("torch", {})
    capability = str(found.get("capability", ""))
    if not capability or "avx2" not in case["cpu"]["sets"]:
        return None
    if capability in ("DEFAULT", "NO AVX"):
        return Finding(
            f"torch uses none of the processor's vector instructions ({capability})",
            "unset ATEN_CPU_CAPABILITY, or install torch's own build: pip install --force-reinstall torch",
        )
    if not found.get("mkldnn", True):
        return Finding(
            f"torch uses {capability}, but was built without oneDNN", "pip install --force-reinstall torch"
        )
    return Finding(f"torch uses {capability}")


@hosts_check("same-gpus", "gpu", WARNING, "GPUs of the hosts: kind and number")
def same_gpus(cases: Cases) -> Iterator[Finding]:
    """Kinds and numbers."""
    values = {
        h: f"{_count(c)} x {c['gpu']['gpus'][0]['name']}" if _count(c) else "no GPU" for h, c in cases.items()
    }
    if any(_count(case) for case in cases.values()):
        yield from odd_ones(values, "give hosts with fewer GPUs fewer slots, or leave them out (-H)")


@hosts_check(
    "same-driver",
    "gpu",
    WARNING,
    "driver and NCCL of the hosts: NCCL's versions must be the same",
    needs=("gpu", "python"),
)
def same_driver(cases: Cases) -> Iterator[Finding]:
    """Drivers and NCCL."""
    if not any(_count(case) for case in cases.values()):
        return
    values = {
        h: f"driver {c['gpu']['gpus'][0]['driver_version']}" if _count(c) else "no driver"
        for h, c in cases.items()
    }
    yield from odd_ones(values, "install the same driver on all hosts")
    nccl = {
        h: "NCCL "
        + (
            "/".join(v for n, v in c["python"]["versions"].items() if n.startswith("nvidia-nccl"))
            or "(no wheel)"
        )
        for h, c in cases.items()
    }
    for found in odd_ones(nccl, "pip install the same nvidia-nccl-cu12 (or cu13) on all hosts"):
        yield Finding(found.text, found.mend, ERROR, found.hosts)
