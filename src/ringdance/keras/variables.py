"""The variables of a model and of its optimizers: which there are, and whether all have been made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringdance.keras import _private
from ringdance.keras.library import KERAS2, is_built, keras, optimizer_types, variables_of


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer that a model was compiled with, and those that it holds as attributes."""
    values = [one for value in vars(model).values() for one in _members(value)]
    return list({id(one): one for one in values if isinstance(one, optimizer_types)}.values())


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


def is_complete(model: Any, optimizer: Any) -> bool:
    """Let an optimizer (or None) make its variables; return whether the first step will not make any more."""
    layers = [one for one in _private.layers_in(model) if not isinstance(one, keras.metrics.Metric)]
    if not (model.built and all(one.built for one in layers)):
        return False  # an optimizer takes no variables that are made after its own
    if KERAS2 and optimizer is not None and not hasattr(optimizer, "build"):
        optimizer._create_all_weights(list(model.trainable_variables))  # legacy; those that are there stay
    elif optimizer is not None and not is_built(optimizer):
        optimizer.build(list(model.trainable_variables))
    return all(map(is_built, optimizers_of(model)))


def variables_with(model: Any, optimizers: Sequence[Any]) -> list[Any]:
    """Return the variables of a model, then of its optimizers, each once."""
    if hasattr(model, "jax_state_sync"):  # within fit() they are not up to date
        model.jax_state_sync()
    found = [*model.variables, *(one for optimizer in optimizers for one in variables_of(optimizer))]
    return list({id(one): one for one in found}.values())
