"""Check the arguments of distributed optimizers, for all bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError


def check_passes(passes: int) -> None:
    """Raise ArgumentError if ``backward_passes_per_step`` is invalid."""
    if passes <= 0:
        raise ArgumentError(f"backward_passes_per_step must be at least 1, got {passes}.")


def listed_layers(layers: Any, layer_type: type) -> list[Any]:
    """Return the argument ``local_layers`` (None, a layer or several layers) as a list.

    Raises:
        ArgumentError: An element is not a Keras layer.
    """
    if isinstance(layers, layer_type) or not isinstance(layers, Iterable):
        layers = [] if layers is None else [layers]
    listed = list(layers)
    wrong_types = [type(layer).__name__ for layer in listed if not isinstance(layer, layer_type)]
    if wrong_types:
        raise ArgumentError(f"local_layers must be Keras layers, got {', '.join(wrong_types)}.")
    return listed


def scales_of(operation: ReduceOp, predivide: float) -> tuple[float, float]:
    """Return the prescale and postscale factors that implement ``gradient_predivide_factor``."""
    if predivide == 1.0:
        return 1.0, 1.0
    if operation is not ReduceOp.AVERAGE:
        raise ArgumentError("gradient_predivide_factor requires op=Average.")
    return 1.0 / predivide, predivide


def check_groups(
    groups: Any, order: Sequence[int], index_of: Callable[[Any], int | None]
) -> list[tuple[int, ...]]:
    """Convert the argument ``groups`` to groups of parameter indices.

    Args:
        groups: ``None``, a positive number, or lists of parameters.
        order: Indices of the trained parameters.
        index_of: Function that returns a parameter's index, or ``None`` if it is not in the optimizer.

    Raises:
        ArgumentError: ``groups`` has the wrong type, or a parameter appears more than once.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return [tuple(part.tolist()) for part in np.array_split(np.array(order, int), groups) if len(part)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Iterable) for group in groups):
        raise ArgumentError(f"groups={groups!r} must be a positive number or a list of lists of parameters.")
    result: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for group in groups:
        # Parameters that are not in the optimizer are skipped, like those in named_parameters.
        members = tuple(index for index in map(index_of, group) if index is not None)
        if len(set(members)) != len(members) or seen.intersection(members):
            raise ArgumentError("groups: a parameter must not appear more than once.")
        seen.update(members)
        if members:
            result.append(members)
    return result
