"""Optimizers whose gradients are reduced over the ranks.

This module wraps optimizers of ``tf.compat.v1.train``. ``ringdance.keras`` wraps Keras optimizers.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.tensorflow.compression import Compression
from ringdance.tensorflow.gradients import GradientReducer, groups_of
from ringdance.tensorflow.passes import PassSums, reduce_pairs
from ringdance.training.exports import Average
from ringdance.training.gradients.options import check_passes
from ringdance.training.process_sets import ProcessSet, global_process_set


def _delegated(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, name)(*args, **kwargs)

    return method


class _Delegating(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A ``tf.compat.v1`` optimizer that delegates to the optimizer that it wraps."""

    def __init__(
        self, optimizer: Any, reducer: GradientReducer, use_locking: bool, sums: PassSums | None = None
    ) -> None:
        super().__init__(name=reducer.name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reducer = reducer
        self._sums = sums

    def register_local_var(self, var: Any) -> None:
        """Exclude this variable's gradient from the reduction."""
        self._reducer.register_local(var)

    compute_gradients, apply_gradients, get_slot, get_slot_names, variables = map(
        _delegated, ("compute_gradients", "apply_gradients", "get_slot", "get_slot_names", "variables")
    )


class _Reducing(_Delegating):
    """Reduces gradients in ``compute_gradients``, which every training loop calls."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return (gradient, variable) pairs with reduced gradients."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        return reduce_pairs(pairs, self._reducer.reduce, self._sums, self._reducer.sparse_as_dense)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply the gradients. With several passes per step, only the last pass applies them."""
        if self._sums is None:
            return self._optimizer.apply_gradients(grads_and_vars, global_step, name)
        pairs = list(grads_and_vars)
        return self._sums.apply(
            lambda: self._optimizer.apply_gradients(pairs, global_step, name),
            lambda: tf.no_op() if global_step is None else global_step.assign_add(1).op,
        ).op


class _Delta(_Delegating):
    """Optimizer for Adasum. Each rank takes its own step, and then the weight changes are combined."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Take this rank's step, then replace the weight changes with all ranks' combined changes."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        before = [tf.identity(variable) for variable in variables]
        with tf.control_dependencies(before):
            applied = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies(None if tf.executing_eagerly() else [applied]):
            changes = [
                tf.convert_to_tensor(variable.read_value()) - start
                for variable, start in zip(variables, before, strict=True)
            ]
        combined = self._reducer.reduce(changes, variables)
        moved = [
            variable.assign(start + change)
            for variable, start, change in zip(variables, before, combined, strict=True)
        ]
        return None if tf.executing_eagerly() else tf.group(*moved)


def _check_v1(passes: int, averages_adasum: bool) -> None:
    """Raise ArgumentError for options that a ``tf.compat.v1.train`` optimizer does not support."""
    check_passes(passes)
    if averages_adasum:
        raise ArgumentError("op=Adasum does not support average_aggregated_gradients=True. Pass False.")
    if passes > 1 and tf.executing_eagerly():
        raise ArgumentError(
            "A tf.compat.v1 optimizer with backward_passes_per_step > 1 needs a graph. Use a Keras optimizer "
            "in eager execution."
        )


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
    device_sparse: str = "", compression: Any = Compression.none, sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Any = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer whose gradients are reduced over the ranks.

    Args:
        optimizer: A ``tf.compat.v1.train`` optimizer or a Keras optimizer.
        name: Name of the optimizer and prefix of its exchange names. The default is "Distributed"
            ("DistributedDelta" for Adasum) followed by the class name.
        use_locking: Passed to ``tf.compat.v1.train.Optimizer``.
        device_dense: Device on which dense gradients enter the exchange.
        device_sparse: Device on which IndexedSlices enter the exchange.
        compression: ``Compression.fp16`` or ``.bf16`` halves the amount of data sent for float32 gradients.
        sparse_as_dense: If True, reduce IndexedSlices as dense tensors instead of gathering their rows.
        backward_passes_per_step: Number of passes whose gradients are summed before they are reduced.
        op: Average, Sum or Adasum. Adasum combines the weight changes instead of the gradients.
        gradient_predivide_factor: Gradients are divided by this factor before the sum, and the sum is
            multiplied by it (Average only).
        average_aggregated_gradients: If True, divide the sums by ``backward_passes_per_step``.
        num_groups: Deprecated. Use ``groups``.
        groups: Number of groups, or lists of variables whose gradients are exchanged together.
        process_set: The participating ranks. On other ranks, gradients stay local.
        scale_local_gradients: If True, divide gradients of local variables by the number of ranks.

    Raises:
        ArgumentError: An argument is invalid.
    """
    options: dict[str, Any] = {
        "compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
        "groups": groups_of(groups, num_groups), "process_set": process_set,
        "scale_local_gradients": scale_local_gradients, "device_dense": device_dense,
        "device_sparse": device_sparse,
    }
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        keras: Any = importlib.import_module("ringdance.keras")
        return keras.DistributedOptimizer(
            optimizer, name=name, gradient_predivide_factor=gradient_predivide_factor,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, **options,
        )
    adasum = op == ReduceOp.ADASUM
    _check_v1(backward_passes_per_step, adasum and average_aggregated_gradients)
    name = name or ("DistributedDelta" if adasum else "Distributed") + type(optimizer).__name__
    reducer = GradientReducer(name, predivide=gradient_predivide_factor, **options)
    if not adasum:
        passes = backward_passes_per_step
        sums = PassSums(passes, average_aggregated_gradients) if passes > 1 else None
        return _Reducing(optimizer, reducer, use_locking, sums)
    if process_set is not global_process_set:
        raise NotImplementedError("An optimizer with op=Adasum does not support process_set. Omit it.")
    if backward_passes_per_step > 1:
        raise NotImplementedError(
            "op=Adasum in a tf.compat.v1 optimizer supports only one pass per step. Use "
            "backward_passes_per_step=1."
        )
    return _Delta(optimizer, reducer, use_locking)
