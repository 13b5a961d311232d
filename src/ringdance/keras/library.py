"""The Keras version in use: Keras 3, or Keras 2 (``tf_keras``) if ``TF_USE_LEGACY_KERAS`` selects it.

All modules of this package import ``keras`` from here. This module hides the differences between the two
versions, except how an optimizer applies gradients (see ``keras3`` and ``keras2``).
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from ringdance.errors import pip_install
from ringdance.training.gradients.compression import compression_for

KERAS2 = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # the values that TensorFlow accepts

keras: Any
ops: Any  # keras.ops or, for Keras 2, a replacement for the functions that this package uses.
optimizer_types: tuple[Any, ...]
if KERAS2:
    try:
        keras = importlib.import_module("tf_keras")
    except ModuleNotFoundError as error:
        if error.name != "tf_keras":
            raise
        raise ImportError(
            "TF_USE_LEGACY_KERAS selects Keras 2, but tf_keras is not installed. Install it with "
            f"{pip_install('tf_keras')}, or unset the variable to use Keras 3.",
            name="tf_keras",
        ) from None
    tf = importlib.import_module("tensorflow")
    ops = SimpleNamespace(
        cast=tf.cast, convert_to_numpy=np.asarray, convert_to_tensor=tf.convert_to_tensor,
        is_tensor=tf.is_tensor,
    )
    optimizer_types = (keras.optimizers.Optimizer, keras.optimizers.legacy.Optimizer)
else:
    keras = importlib.import_module("keras")
    ops = keras.ops
    optimizer_types = (keras.optimizers.Optimizer,)


def read(variable: Any) -> np.ndarray[Any, Any]:
    """Return a contiguous copy of a variable's value."""
    value = variable if KERAS2 else variable.value
    return np.array(ops.convert_to_numpy(value), order="C")


def number(value: Any) -> float:
    """Return a scalar tensor, variable or number as a float."""
    return float(value if isinstance(value, (int, float)) else ops.convert_to_numpy(value))


def forms(variable: Any) -> set[int]:
    """Return the id of a Keras variable and, on TensorFlow, of its tf.Variable. Training loops use both."""
    # On JAX, a variable has no value while a step is being compiled.
    both = not KERAS2 and keras.backend.backend() == "tensorflow" and isinstance(variable, keras.Variable)
    return {id(variable), id(variable.value if both else variable)}


def variables_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables, or an empty list if ``optimizer`` is None."""
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def is_built(optimizer: Any) -> bool:
    """Return True if an optimizer has created its variables."""
    if not KERAS2:
        return bool(optimizer.built)
    is_legacy = not hasattr(optimizer, "build")
    return bool(variables_of(optimizer) if is_legacy else getattr(optimizer, "_built", False))


def _floating_dtype(tensor: Any) -> Any:
    """Return the tensor's dtype if it is a floating-point type, otherwise None."""
    return tensor.dtype if ops.is_tensor(tensor) and "float" in str(tensor.dtype) else None


Compression = compression_for(__name__, "float16", "bfloat16", _floating_dtype, ops.cast)
