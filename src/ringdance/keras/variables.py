"""Find, and if necessary create, the variables of a model and its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringdance.keras import _private
from ringdance.keras.library import KERAS2, is_built, keras, optimizer_types, variables_of


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer with which a model was compiled, and optimizers among its attributes."""
    values = [member for value in vars(model).values() for member in _members(value)]
    return list({id(value): value for value in values if isinstance(value, optimizer_types)}.values())


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


def is_complete(model: Any, optimizer: Any) -> bool:
    """Create the variables of ``optimizer``, if given. Returns True if the first step will create no more."""
    layers = [layer for layer in _private.layers_in(model) if not isinstance(layer, keras.metrics.Metric)]
    if not (model.built and all(layer.built for layer in layers)):
        return False  # A built optimizer rejects variables that are created later.
    if KERAS2 and optimizer is not None and not hasattr(optimizer, "build"):
        optimizer._create_all_weights(list(model.trainable_variables))  # Keeps existing weights.
    elif optimizer is not None and not is_built(optimizer):
        optimizer.build(list(model.trainable_variables))
    return all(map(is_built, optimizers_of(model)))


def variables_with(model: Any, optimizers: Sequence[Any]) -> list[Any]:
    """Return the variables of a model, followed by the variables of ``optimizers``, without duplicates."""
    if hasattr(model, "jax_state_sync"):  # On JAX, the variables are stale during fit().
        model.jax_state_sync()
    variables = [*model.variables, *(one for optimizer in optimizers for one in variables_of(optimizer))]
    return list({id(variable): variable for variable in variables}.values())
