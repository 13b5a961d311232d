"""Frameworks, imported in processes of their own: do they load, and what do they use of the machine?"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted

_LIMIT_S = 90.0
_SCRIPTS = {
    "torch": """
import torch
found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "sees": torch.cuda.device_count(),
         "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
         "mkldnn": torch.backends.mkldnn.is_available(), "nccl": ""}
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""
except Exception:
    pass
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
_DISTRIBUTIONS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu"), "jax": ("jax",)}


def look(wanted: Wanted) -> dict[str, Any]:
    """For each installed framework: what it said of itself, or the error that its import ended with."""
    names = [name for name in _SCRIPTS if any(map(_installed, _DISTRIBUTIONS[name]))]
    with ThreadPoolExecutor(max(1, len(names))) as pool:  # each import takes seconds
        return {"of": dict(zip(names, pool.map(_ask, names), strict=True))}


def _ask(name: str) -> dict[str, Any]:
    program = f"{_SCRIPTS[name]}\nimport json; print('\\n::found::' + json.dumps(found))"
    code, said, errors = files.run([sys.executable, "-P", "-c", program], _LIMIT_S, _environment())
    mark = said.rpartition("::found::")[2]
    if code == 0 and mark:
        found: dict[str, Any] = json.loads(mark)
        return found
    return {"error": files.last_line(errors) or f"exit code {code}"}


def _environment() -> dict[str, str]:
    """This process's; without a home directory TensorFlow's Keras would make one called "~" here."""
    known = os.path.expanduser("~") != "~"
    return {**os.environ, **({} if known else {"KERAS_HOME": os.path.join(tempfile.gettempdir(), ".keras")})}


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
