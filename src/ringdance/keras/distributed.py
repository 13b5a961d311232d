"""What an optimizer of either Keras gains by becoming a DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdance.keras.library import forms, variables_of
from ringdance.keras.reduction import Reduction

__all__ = ["Distributed", "is_distributed"]


class _Listed(list[Any]):
    """A list that can be called as well, as ``optimizer.variables`` could in TensorFlow 2's Keras."""

    def __call__(self) -> list[Any]:
        return self


class Distributed:
    """What is put in front of the optimizer's own class; its options are attributes of the subclass.

    Derived classes call ``_reduce`` where their Keras comes by with the gradients of a step.
    """

    _reduction: Reduction
    _scale_local: bool
    _factor: float = 1.0  # of reduced gradients: a sum of several passes where Keras takes their mean
    _local_layers: tuple[Any, ...] = ()
    _local_variables: tuple[Any, ...] = ()

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables; ``optimizer.variables()`` is the same."""
        return _Listed(variables_of(super()))

    def register_local_var(self, var: Any) -> None:
        """Leave this variable's gradient on this rank; see ``scale_local_gradients``."""
        object.__setattr__(self, "_local_variables", (*self._local_variables, var))

    def _reduce(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        local = self._local_places(variables)
        places = [place for place in range(len(gradients)) if place not in local]
        shared = self._reduction([gradients[one] for one in places], [variables[one] for one in places])
        results = list(gradients)
        for place, one in zip(places, shared, strict=True):
            results[place] = _times(one, self._factor)
        # An average over the ranks is n times smaller than the sum; so is what one rank gives alone.
        share = 1 / (self._reduction.process_set.size() or 1) if self._scale_local else 1.0
        for place in local:
            results[place] = _times(gradients[place], self._factor * share)
        return results

    def _local_places(self, variables: Sequence[Any]) -> set[int]:
        layers = [variable for layer in self._local_layers for variable in layer.trainable_variables]
        local = {id(same) for one in (*self._local_variables, *layers) for same in forms(one)}
        if not local:
            return set()
        return {
            place for place, variable in enumerate(variables)
            if any(id(same) in local for same in forms(variable))
        }


def _times(gradient: Any, factor: float) -> Any:
    if gradient is None or factor == 1.0:
        return gradient
    if hasattr(gradient, "indices") and hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is a DistributedOptimizer, or wraps one."""
    if isinstance(optimizer, Distributed):
        return True
    inner = getattr(optimizer, "inner_optimizer", None)
    return inner is not None and is_distributed(inner)
