"""Sum gradients over several backward passes before they are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringdance.errors import ArgumentError
from ringdance.tensorflow.exchange import in_session, order_after, plain

Pairs = list[tuple[Any, Any]]  # (gradient, variable)
Reduce = Callable[[list[Any], Sequence[Any]], list[Any]]

_NAME = "ringdance_sums"
_eager: weakref.WeakSet[PassSums] = weakref.WeakSet()


def reset_sums(session: Any = None) -> None:
    """Clear all sums in a session's graph, or in eager execution if ``session`` is None.

    Needed because ranks may be in different passes after an error.
    """
    if session is not None:
        for variable in session.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES):
            if _NAME in variable.name:
                variable.load(np.zeros(variable.shape, variable.dtype.base_dtype.as_numpy_dtype), session)
        return
    for sums in list(_eager):
        for variable in (sums.counter, *[variable for _, variable in sums._sums.values()]):
            variable.assign(tf.zeros_like(variable))


class PassSums:
    """Gradient sums, kept in variables. Works eagerly, in a ``tf.function`` and in a session.

    Args:
        passes: Number of passes to sum.
        average: If True, reduce the mean over the passes instead of the sum.

    Attributes:
        counter: Variable that counts the passes since the last exchange, or None before the first pass.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self.passes = passes
        self.average = average
        self.counter: Any = None
        self._sums: dict[int, Any] = {}  # Maps a variable's id to the variable and its sum.
        self._full: Any = None  # In a session's graph, True in the last pass before an exchange.

    @plain
    def add(self, gradients: list[Any], variables: Sequence[Any], reduce: Reduce) -> list[Any]:
        """Return the gradients to apply: the reduced sums in the last pass of a step, otherwise zeros.

        Args:
            gradients: Dense tensors or None.
            variables: The variable of each gradient.
            reduce: Called with the sums (``None`` for variables that never had a gradient) and the variables.

        Raises:
            ArgumentError: ``gradients`` contains IndexedSlices.
        """
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise ArgumentError(
                "backward_passes_per_step > 1 cannot sum IndexedSlices. Set sparse_as_dense=True."
            )
        pairs = list(zip(variables, gradients, strict=True))
        all_sums = [self._sum_of(*pair) for pair in pairs]
        present = [index for index, total in enumerate(all_sums) if total is not None]
        if not present:
            return reduce(gradients, variables)
        sums = [all_sums[index] for index in present]
        added = [all_sums[index].assign_add(new) for index, new in enumerate(gradients) if new is not None]
        with tf.control_dependencies(added):
            count = self.counter.assign((self.counter.read_value() + 1) % self.passes)
            self._full = tf.equal(count, 0)

        def reduced() -> list[Any]:
            divisor = self.passes if self.average else 1
            means = [
                None if acc is None else acc.read_value() / tf.cast(divisor, acc.dtype) for acc in all_sums
            ]
            reduced_means = reduce(means, variables)
            results = [reduced_means[index] for index in present]
            with tf.control_dependencies(results):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(cleared):
                return [tf.identity(result) for result in results]

        with tf.control_dependencies([self._full]):
            chosen = tf.cond(self._full, reduced, lambda: [tf.zeros_like(total) for total in sums])
        results: list[Any] = [None] * len(gradients)
        chosen = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
        order_after(chosen)
        for index, result in zip(present, chosen, strict=True):
            results[index] = result
        return results

    @plain
    def apply(self, apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Run ``apply`` in the last pass of a step, otherwise ``skip``. Returns a tensor with value True."""
        if self.counter is None:
            return apply()

        def true_after(result: Any) -> Any:
            with tf.control_dependencies([] if result is None else [result]):
                return tf.constant(True)

        full = self._full if in_session() else tf.equal(self.counter, 0)
        return tf.cond(full, lambda: true_after(apply()), lambda: true_after(skip()))

    def _sum_of(self, variable: Any, gradient: Any) -> Any:
        """Return the sum of a variable's gradients, or None if it has not had a gradient yet."""
        if id(variable) not in self._sums:
            if gradient is None:
                return None
            if self.counter is None:
                self.counter = _variable((), tf.int32)
                if tf.compat.v1.executing_eagerly_outside_functions():
                    _eager.add(self)
            self._sums[id(variable)] = variable, _variable(variable.shape, gradient.dtype)
        return self._sums[id(variable)][1]


def reduce_pairs(pairs: Pairs, reduce: Reduce, sums: PassSums | None, sparse_as_dense: bool) -> Pairs:
    """Return the pairs with reduced gradients. With ``sums``, gradients are first summed over the passes."""
    gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if sums is None:
        return list(zip(reduce(gradients, variables), variables, strict=True))
    if sparse_as_dense:
        gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
    return list(zip(sums.add(gradients, variables, reduce), variables, strict=True))


def _variable(shape: Any, dtype: Any) -> Any:
    with tf.init_scope():  # A tf.function can create variables only in its first trace.
        return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, name=_NAME)
