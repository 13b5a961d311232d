"""Reduce the gradients of Keras 2 (``tf_keras``) optimizers.

New optimizers (``optimizers.Optimizer``) and legacy optimizers (``optimizers.legacy.Optimizer``) have two
methods that can be overridden, with or without a leading underscore: ``compute_gradients`` and
``aggregate_gradients``. ``fit()`` and ``minimize()`` call ``compute_gradients``. ``apply_gradients`` calls
``aggregate_gradients``, and so does a ``LossScaleOptimizer`` before it checks for infinities. Gradients that
``compute_gradients`` has reduced are not reduced again by ``aggregate_gradients``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import tensorflow as tf

from ringdance.keras.library import keras
from ringdance.keras.reduction import Distributed
from ringdance.tensorflow.passes import Pairs, PassSums, reduce_pairs


class Keras2Distributed(Distributed):
    """Reduces gradients in ``compute_gradients`` or, if it is not called, in ``apply_gradients``."""

    _passes: int = 1
    _average: bool = False

    # Created when needed, because from_config() also creates objects of this class. cached_property bypasses
    # __setattr__, through which Keras would track the values.
    @cached_property
    def _agg_helper(self) -> PassSums | None:
        """Gradient sums over several passes, or None with one pass per step. Scripts read its ``counter``."""
        return PassSums(self._passes, self._average) if self._passes > 1 else None

    @cached_property
    def _reduced_in(self) -> set[Any]:
        """Graphs (or None, for eager execution) with reduced gradients that have not been applied yet."""
        return set()

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Pairs:
        """Return (gradient, variable) pairs with gradients that are reduced over the ranks."""
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Pairs:
        base: Any = super()
        if hasattr(base, "_compute_gradients"):
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape)
        else:
            pairs = base.compute_gradients(loss, var_list, tape)
        self._reduced_in.add(_program())
        return self._reduce_pairs(pairs)

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Reduce gradients over the ranks, after Keras has reduced them over the devices of this process."""
        base: Any = super()
        aggregate = getattr(base, "_aggregate_gradients", None) or base.aggregate_gradients
        pairs = list(aggregate(grads_and_vars))
        return pairs if self._reduced_in else self._reduce_pairs(pairs)

    _aggregate_gradients = aggregate_gradients

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Update the variables, but only in the last pass of a step. ``iterations`` counts all passes."""
        aggregate = experimental_aggregate_gradients and not skip_gradients_aggregation
        base: Any = super()
        pairs, sums = list(grads_and_vars), self._agg_helper
        self._remember([variable for _, variable in pairs])
        if sums is not None and aggregate:
            pairs, aggregate = self.aggregate_gradients(pairs), False

        def apply() -> Any:
            options = {} if aggregate else {"experimental_aggregate_gradients": False}
            return base.apply_gradients(pairs, name, **options)

        def skip() -> Any:
            optimizer: Any = self
            return optimizer.iterations.assign_add(1)

        result = apply() if sums is None else sums.apply(apply, skip)
        self._reduced_in.discard(_program())
        return result

    def _reduce_pairs(self, pairs: Pairs) -> Pairs:
        return reduce_pairs(pairs, self._reduce, self._agg_helper, self._reduction.sparse_as_dense)


def _program() -> Any:
    """Return the outermost graph that is being traced, or None in eager execution."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that reduces gradients: for a LossScaleOptimizer, its inner optimizer."""
    if not isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer):
        return optimizer
    return optimizer.inner_optimizer


def front(base: type) -> type:
    """Return the mixin class that the distributed subclass of ``base`` inherits from."""
    return Keras2Distributed


def class_options(base: type) -> dict[str, Any]:
    """Return the attributes that make Keras save a subclass as ``base``."""
    names = {name: value for name, value in vars(base).items() if "_api_names" in name}
    return {"__module__": base.__module__, **names}


def pass_options(optimizer: Any, passes: int, average: bool) -> dict[str, Any]:
    """Return the class attributes that make an optimizer sum or average gradients over ``passes`` passes."""
    return {"_passes": passes, "_average": average}


def adapt() -> None:
    """Do nothing. Keras 2 needs no patch, because the mixin can override all relevant optimizer methods."""
