"""What a DistributedOptimizer adds to an optimizer of Keras 2 or 3."""

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
    """The base that comes before the optimizer's own class; options are attributes of the subclass.

    Derived classes call ``_reduce`` where their Keras processes the gradients of a step.
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
        layers = [variable for layer in self._local_layers for variable in layer.trainable_variables]
        ids = set().union(*map(forms, [*self._local_variables, *layers]))
        local = [not ids.isdisjoint(forms(variable)) for variable in variables]
        shared = [index for index, here in enumerate(local) if not here]
        chosen = [[listed[index] for index in shared] for listed in (gradients, variables)]
        reduced = iter(self._reduction(*chosen))
        # An average over the ranks is n times smaller than the sum; so is the gradient of one rank alone.
        share = 1 / (self._reduction.process_set.size() or 1) if self._scale_local else 1.0
        return [
            _times(one, self._factor * share) if here else _times(next(reduced), self._factor)
            for one, here in zip(gradients, local, strict=True)
        ]


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
