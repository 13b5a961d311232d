"""Private Keras names that the binding uses or overrides, the reason for each, and the behavior without it.

Present in Keras 3.6 to 3.15 and in Keras 2 (tf_keras) 2.16 to 2.21, which no longer changes. Each name is
looked up when it is needed. The tests also cover the case in which it is missing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, keras

# Optimizer._backend_apply_gradients and ._clip_gradients: overridden here; Keras calls them with an update's
# variables and gradients. Optimizer._iterations: counts the steps, not the updates. Without these names,
# gradient accumulation is refused.
_ACCUMULATION = ("_backend_apply_gradients", "_clip_gradients", "_iterations")


def check_accumulation(optimizer: Any) -> None:
    """Raise ArgumentError if this Keras accumulates gradients in an unknown way."""
    missing = [name for name in _ACCUMULATION if not hasattr(optimizer, name)]
    if missing:
        raise ArgumentError(
            f"Ringdance does not know how Keras {keras.__version__} accumulates gradients (it has no "
            f"{', '.join(missing)}). Use another version, or one pass per step."
        )


def accumulators(optimizer: Any) -> list[Any]:
    """Return the variables in which an optimizer accumulates gradients.

    Optimizer._accumulated_gradients: without this name, infinities stay in these variables on torch, where
    Keras resets them by multiplying by zero.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [variable for variable in getattr(inner, "_accumulated_gradients", ()) if variable is not None]


def trainable_variables(optimizer: Any, otherwise: list[Any] | None = None) -> list[Any]:
    """Return the variables that an optimizer was built for, in the order of its gradients, or ``otherwise``.

    Optimizer._trainable_variables: the variables that ``apply()`` uses if none are passed. Without this name,
    an error asks for them.
    """
    if variables := getattr(optimizer, "_trainable_variables", None):
        return list(variables)
    if otherwise is not None:
        return otherwise
    if not hasattr(optimizer, "_trainable_variables"):
        raise ArgumentError(f"With Keras {keras.__version__}, apply() needs trainable_variables.")
    return []


def layers_in(model: Any) -> list[Any]:
    """Return a model's layers, including nested layers.

    Model._flatten_layers: also yields the layers inside layers. Without this name, nested layers are assumed
    to have created their variables already.
    """
    flatten = getattr(model, "_flatten_layers", None)
    return list(model.layers if flatten is None else flatten(include_self=False, recursive=True))


def without_xla(has_exchange: Callable[[Any], bool]) -> None:
    """Make ``jit_compile="auto"`` mean False for models whose TensorFlow step exchanges gradients.

    Trainer._resolve_auto_jit_compile: XLA cannot compile an exchange between ranks into a TensorFlow step.
    Without this name, an error raised while the step is traced asks for ``jit_compile=False``.
    """
    trainer: Any = getattr(sys.modules.get("keras.src.trainers.trainer"), "Trainer", None)
    resolve = getattr(trainer, "_resolve_auto_jit_compile", None)
    if resolve is None:
        return

    @functools.wraps(resolve)
    def resolved(self: Any) -> bool:
        if keras.backend.backend() == "tensorflow" and has_exchange(getattr(self, "optimizer", None)):
            return False
        return bool(resolve(self))

    trainer._resolve_auto_jit_compile = resolved


def register_as(made: type, name: str) -> None:
    """Let Keras save objects of a class under another class's registered name.

    object_registration.GLOBAL_CUSTOM_NAMES: Keras's own function would register the class under both names.
    Without this name, a model is saved with the new class's name and needs ``custom_objects`` to be loaded.
    """
    module = sys.modules.get(f"{keras.__name__}.src.saving.object_registration")
    getattr(module, "_GLOBAL_CUSTOM_NAMES" if KERAS2 else "GLOBAL_CUSTOM_NAMES", {})[made] = name
