"""All private Keras names that the binding uses or overrides, with the reason and the fallback for each.

These names exist in Keras 3.6 to 3.15 and in Keras 2 (tf_keras) 2.16 to 2.21. They are looked up when they
are needed. The tests also cover the case where a name is missing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, keras

# Optimizer._backend_apply_gradients and ._clip_gradients: overridden by the binding. Keras calls them with
# the variables and gradients of an update. Optimizer._iterations: counts steps, not updates. If a name is
# missing, gradient accumulation raises an error.
_ACCUMULATION = ("_backend_apply_gradients", "_clip_gradients", "_iterations")


def check_accumulation(optimizer: Any) -> None:
    """Raise ArgumentError unless Ringdance supports how this version of Keras accumulates gradients."""
    missing = [name for name in _ACCUMULATION if not hasattr(optimizer, name)]
    if missing:
        raise ArgumentError(
            f"Ringdance does not support how Keras {keras.__version__} accumulates gradients, because its "
            f"optimizers lack {', '.join(missing)}. Use a different version of Keras, or one pass per step."
        )


def accumulators(optimizer: Any) -> list[Any]:
    """Return the variables in which an optimizer accumulates gradients.

    Optimizer._accumulated_gradients: if the name is missing, infinities remain in these variables on torch,
    because Keras resets them there by multiplying them by zero.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [variable for variable in getattr(inner, "_accumulated_gradients", ()) if variable is not None]


def trainable_variables(optimizer: Any, otherwise: list[Any] | None = None) -> list[Any]:
    """Return the variables that an optimizer was built for, in the order in which it expects gradients.

    Returns ``otherwise`` if the optimizer has not been built. Optimizer._trainable_variables: the variables
    that ``apply()`` uses if none are passed. If the name is missing and ``otherwise`` is None, an error is
    raised that asks the caller to pass the variables.
    """
    if variables := getattr(optimizer, "_trainable_variables", None):
        return list(variables)
    if otherwise is not None:
        return otherwise
    if not hasattr(optimizer, "_trainable_variables"):
        raise ArgumentError(
            f"With Keras {keras.__version__}, apply() needs trainable_variables. Pass them as its second "
            "argument."
        )
    return []


def layers_in(model: Any) -> list[Any]:
    """Return a model's layers, including nested layers.

    Model._flatten_layers: also yields nested layers. If the name is missing, nested layers are assumed to
    have already created their variables.
    """
    flatten = getattr(model, "_flatten_layers", None)
    return list(model.layers if flatten is None else flatten(include_self=False, recursive=True))


def without_xla(has_exchange: Callable[[Any], bool]) -> None:
    """Resolve ``jit_compile="auto"`` to False for models whose TensorFlow train step exchanges gradients.

    Trainer._resolve_auto_jit_compile: overridden, because XLA cannot compile an exchange between ranks. If
    the name is missing, tracing the step raises an error that recommends ``jit_compile=False``.
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
    """Let Keras save objects of a class under the registered name of another class.

    object_registration.GLOBAL_CUSTOM_NAMES: used because Keras's public function would also register the
    class under its own name. If the name is missing, a model is saved with the name of the new class, and
    ``custom_objects`` is needed to load it.
    """
    module = sys.modules.get(f"{keras.__name__}.src.saving.object_registration")
    getattr(module, "_GLOBAL_CUSTOM_NAMES" if KERAS2 else "GLOBAL_CUSTOM_NAMES", {})[made] = name
