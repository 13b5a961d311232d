"""Check the GPUs, the GPU driver, and the frameworks that use the GPUs. Imports only the standard library."""

from __future__ import annotations

import glob
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from ringdance.host.system import linux
from ringdance.launch.hosts import counted
from ringdance.tools.doctor.check import (
    ERROR,
    WARNING,
    Check,
    Finding,
    HostFacts,
    Usage,
    equal,
    last_line,
    limit,
)

_LIMIT_S = 90.0
_SCRIPTS = {
    "torch": """
import torch
found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "sees": torch.cuda.device_count()}
""",
    "tensorflow": """
import tensorflow as tf
build = tf.sysconfig.get_build_info()
found = {"version": tf.__version__, "cuda": str(build.get("cuda_version") or ""),
         "sees": len(tf.config.list_physical_devices("GPU"))}
""",
    "jax": """
import jax
found = {"version": jax.__version__, "sees": sum(d.platform == "gpu" for d in jax.devices())}
""",
}
_MARK = "::found::"

# --- facts -----------------------------------------------------------------------------------------


def gpu_facts(usage: Usage) -> dict[str, Any]:
    """Collect the number of GPUs on the PCI bus, the number of device files, and facts from nvidia-smi."""
    on_bus = [
        path
        for path in glob.glob("/sys/bus/pci/devices/*/vendor")
        if linux.text(path) == "0x10de" and linux.text(path[:-6] + "class").startswith("0x03")
    ]
    code, output, errors = linux.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    names = [line.strip() for line in output.splitlines()] if code == 0 else []
    table = linux.run(["nvidia-smi"])[1] if names else ""
    return {
        "on_bus": len(on_bus),
        "devices": len(glob.glob("/dev/nvidia[0-9]*")),
        "names": names,
        "count": len(names),
        "cuda": table.partition("CUDA Version:")[2].strip().partition(" ")[0],
        "smi": {"code": code, "output": last_line(errors or output), "missing": errors == os.strerror(2)},
    }


def frameworks_facts(usage: Usage) -> dict[str, Any]:
    """Collect each installed framework's version, CUDA version and number of GPUs, or its import error."""
    names = [name for name in _SCRIPTS if find_spec(name)]
    with ThreadPoolExecutor(max(1, len(names))) as pool:  # each import takes several seconds
        return {"of": dict(zip(names, pool.map(_import, names), strict=True))}


def _import(name: str) -> dict[str, Any]:
    program = f"{_SCRIPTS[name]}\nimport json; print('\\n{_MARK}' + json.dumps(found))"
    environ = dict(os.environ)
    if os.path.expanduser("~") == "~":  # otherwise, TensorFlow's Keras would create a directory named "~"
        environ["KERAS_HOME"] = os.path.join(tempfile.gettempdir(), ".keras")
    code, output, errors = linux.run([sys.executable, "-P", "-c", program], _LIMIT_S, environ)
    text = output.rpartition(_MARK)[2]
    if code or not text:
        return {"error": last_line(errors) or f"exit code {code}"}
    return json.loads(text)


# --- checks ----------------------------------------------------------------------------------------


def _driver(host: HostFacts) -> Finding | None:
    gpus, smi = host["gpu"], host["gpu"]["smi"]
    if gpus["count"]:
        text = f"{gpus['count']} x {gpus['names'][0]}"
        if gpus["on_bus"] <= gpus["count"]:
            return Finding(text)
        return Finding(
            f"{text}, but the PCI bus has {gpus['on_bus']} GPUs",
            "look for driver errors: sudo dmesg | grep -iE 'nvrm|xid'",
        )
    present = max(gpus["on_bus"], gpus["devices"])
    if smi["missing"] and present:
        return Finding(
            f"{counted(present, 'GPU')}, but nvidia-smi is missing",
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


def _visible_devices(host: HostFacts) -> Finding | None:
    value = host.variable("CUDA_VISIBLE_DEVICES")
    if not value:
        return None
    count = host["gpu"]["count"] or host["gpu"]["devices"]
    text = f"CUDA_VISIBLE_DEVICES={value}"
    if any(word.strip().isdigit() and int(word) >= count for word in value.split(",")):
        return Finding(f"{text}, but this host has {counted(count, 'GPU')}", "unset CUDA_VISIBLE_DEVICES")
    return Finding(text)


def _framework_gpus(host: HostFacts) -> Iterator[Finding]:
    cuda = host["gpu"]["cuda"]
    for name, framework in host["frameworks"]["of"].items():
        if not host["gpu"]["count"] or "error" in framework:
            continue
        text = f"{name} {framework['version']} sees {counted(framework['sees'], 'GPU')}"
        if framework["sees"]:
            yield Finding(text)
        elif framework.get("cuda"):
            yield Finding(
                f"{text}: it was built for CUDA {framework['cuda']}, but the driver supports CUDA {cuda}",
                "update the driver, or install a build for the CUDA version that this driver supports",
            )
        else:
            fix = f"pip uninstall {name}, then install its build for CUDA {cuda.partition('.')[0]}"
            yield Finding(f"{text}, because it is a CPU-only build", fix)


def _imports(host: HostFacts) -> Iterator[Finding]:
    for name, facts in host["frameworks"]["of"].items():
        if "error" in facts:
            yield Finding(f"import {name} fails: {facts['error']}", f"pip install --force-reinstall {name}")
        else:
            yield Finding(f"{name} {facts['version']} can be imported")


def _nccl(host: HostFacts) -> dict[str, str]:
    versions = [text for name, text in host["python"]["versions"].items() if name.startswith("nvidia-nccl")]
    return {"NCCL": "/".join(versions) or "(no wheel)"} if host["gpu"]["count"] else {}


CHECKS = (
    Check("gpu-driver", "gpu", ERROR, "the driver must report all of the machine's GPUs", _driver),
    Check("gpu-ranks", "gpu", WARNING, "a host should not have more ranks than GPUs",
          limit("{slots:rank} on {gpu[count]:GPU}",
                lambda host: host.slots > host["gpu"]["count"],
                "start {gpu[count]:rank} on this host, one per GPU",
                applies=lambda host: host.slots and host["gpu"]["count"])),
    Check("visible-devices", "gpu", WARNING, "the GPUs in CUDA_VISIBLE_DEVICES should exist",
          _visible_devices, ("environment", "gpu")),
    Check("gpu-framework", "gpu", ERROR, "frameworks must support GPUs on a machine that has GPUs",
          _framework_gpus, ("gpu", "frameworks")),
    Check("framework-imports", "frameworks", ERROR, "installed frameworks must be importable", _imports),
    Check("same-nccl", "gpu", ERROR, "all hosts with GPUs must have the same NCCL version",
          equal(_nccl, "install the same nvidia-nccl-cu12 (or cu13) on all hosts"), ("gpu", "python"),
          compares=True),
)  # fmt: skip
