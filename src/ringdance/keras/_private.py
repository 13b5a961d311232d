"""Private names of Keras that the binding uses or overrides: why, and what happens without each.

Seen in Keras 3.6 to 3.15 and in Keras 2 (tf_keras) 2.16 to 2.21, which does not change any more. Each is
looked up when it is needed; the tests try what happens where it is missing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, keras

# Optimizer._backend_apply_gradients and ._clip_gradients: overridden, Keras calls them with the variables and
# with the gradients of an update. Optimizer._iterations: counts the steps, not the updates. Without
# them gradient accumulation is refused.
_ACCUMULATION = ("_backend_apply_gradients", "_clip_gradients", "_iterations")


def check_accumulation(optimizer: Any) -> None:
    """Raise ArgumentError if this Keras accumulates gradients in an unknown way."""
    missing = [name for name in _ACCUMULATION if not hasattr(optimizer, name)]
    if missing:
        raise ArgumentError(
            f"Ringdance does not know how Keras {keras.__version__} accumulates gradients (it has no "
            f"{', '.join(missing)}): use another version, or one pass in each step."
        )


def accumulators(optimizer: Any) -> list[Any]:
    """Return the variables in which an optimizer accumulates gradients.

    Optimizer._accumulated_gradients: without this name infinities stay in them on torch, where Keras
    multiplies by zero.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [one for one in getattr(inner, "_accumulated_gradients", ()) if one is not None]


def trainable_variables(optimizer: Any, otherwise: list[Any] | None = None) -> list[Any]:
    """Return the variables that an optimizer was built for, in the order of its gradients, or ``otherwise``.

    Optimizer._trainable_variables: those of ``apply()`` without variables. Without it an error asks for them.
    """
    if found := getattr(optimizer, "_trainable_variables", None):
        return list(found)
    if otherwise is not None:
        return otherwise
    if not hasattr(optimizer, "_trainable_variables"):
        raise ArgumentError(f"With Keras {keras.__version__} apply() needs trainable_variables.")
    return []


def layers_in(model: Any) -> list[Any]:
    """Return the layers in a model and in its layers.

    Model._flatten_layers: those that layers hold, too. Without it they are taken to have their variables.
    """
    flatten = getattr(model, "_flatten_layers", None)
    return list(model.layers if flatten is None else flatten(include_self=False, recursive=True))


def without_xla(has_exchange: Callable[[Any], bool]) -> None:
    """Make ``jit_compile="auto"`` mean no for models whose TensorFlow step exchanges gradients.

    Trainer._resolve_auto_jit_compile: XLA cannot compile an exchange between ranks into a TensorFlow step.
    Without it an error where the step is traced asks for ``jit_compile=False``.
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
    """Let Keras save objects of a class under the registered name of another.

    object_registration.GLOBAL_CUSTOM_NAMES: Keras's own function would register the class under both. Without
    it a model is saved with the name of the new class, and needs ``custom_objects`` when it is loaded.
    """
    module = sys.modules.get(f"{keras.__name__}.src.saving.object_registration")
    getattr(module, "_GLOBAL_CUSTOM_NAMES" if KERAS2 else "GLOBAL_CUSTOM_NAMES", {})[made] = name
