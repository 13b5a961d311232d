"""Frameworks, imported in processes of their own: whether that works, and the GPUs that they see."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files

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


def collect(usage: Usage) -> dict[str, Any]:
    """For each installed framework its version, CUDA version and number of GPUs, or the import's error."""
    names = [name for name in _SCRIPTS if find_spec(name)]
    with ThreadPoolExecutor(max(1, len(names))) as pool:  # each import takes seconds
        return {"of": dict(zip(names, pool.map(_import, names), strict=True))}


def _import(name: str) -> dict[str, Any]:
    program = f"{_SCRIPTS[name]}\nimport json; print('\\n{_MARK}' + json.dumps(found))"
    environ = dict(os.environ)
    if os.path.expanduser("~") == "~":  # TensorFlow's Keras would make a directory called "~" here
        environ["KERAS_HOME"] = os.path.join(tempfile.gettempdir(), ".keras")
    code, output, errors = files.run([sys.executable, "-P", "-c", program], _LIMIT_S, environ)
    text = output.rpartition(_MARK)[2]
    if code or not text:
        return {"error": files.last_line(errors) or f"exit code {code}"}
    return json.loads(text)
