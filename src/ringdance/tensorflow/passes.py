"""Gradients of several passes, summed before they are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringdance.errors import ArgumentError
from ringdance.tensorflow.exchange import in_session, order_after, plain

Pairs = list[tuple[Any, Any]]  # of a gradient and its variable
Reduce = Callable[[list[Any], Sequence[Any]], list[Any]]

_NAME = "ringdance_sums"
_eager: weakref.WeakSet[PassSums] = weakref.WeakSet()


def reset_sums(session: Any = None) -> None:
    """Clear all sums in the graph of a session, or with None in eager execution.

    After an error ranks may be in different passes.
    """
    if session is not None:
        for one in session.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES):
            if _NAME in one.name:
                one.load(np.zeros(one.shape, one.dtype.base_dtype.as_numpy_dtype), session)
        return
    for sums in list(_eager):
        for one in (sums.counter, *[one for _, one in sums._sums.values()]):
            one.assign(tf.zeros_like(one))


class PassSums:
    """Sums of gradients in variables: eagerly, in a ``tf.function`` or in a session.

    Args:
        passes: how many are summed.
        average: whether their mean is wanted.

    Attributes:
        counter: a variable, the passes since the last exchange; None before the first pass.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self.passes = passes
        self.average = average
        self.counter: Any = None
        self._sums: dict[int, Any] = {}  # by the id of the variable, which is kept beside the sum
        self._full: Any = None  # in the graph of a session: whether this pass is the last of its row

    @plain
    def add(self, gradients: list[Any], variables: Sequence[Any], reduce: Reduce) -> list[Any]:
        """Return what to apply: reduced sums in every last pass, else zeros.

        Args:
            gradients: dense tensors or None.
            variables: what they belong to.
            reduce: gets the sums, ``None`` for what never had a gradient, and the variables.

        Raises:
            ArgumentError: there are IndexedSlices.
        """
        if any(isinstance(one, tf.IndexedSlices) for one in gradients):
            raise ArgumentError(
                "backward_passes_per_step > 1 cannot sum IndexedSlices: set sparse_as_dense=True."
            )
        pairs = list(zip(variables, gradients, strict=True))
        every = [self._sum_of(*pair) for pair in pairs]
        there = [index for index, one in enumerate(every) if one is not None]
        if not there:
            return reduce(gradients, variables)
        sums = [every[index] for index in there]
        added = [every[index].assign_add(one) for index, one in enumerate(gradients) if one is not None]
        with tf.control_dependencies(added):
            count = self.counter.assign((self.counter.read_value() + 1) % self.passes)
            self._full = tf.equal(count, 0)

        def reduced() -> list[Any]:
            divisor = self.passes if self.average else 1
            means = [
                None if one is None else one.read_value() / tf.cast(divisor, one.dtype) for one in every
            ]
            done = reduce(means, variables)
            results = [done[index] for index in there]
            with tf.control_dependencies(results):
                cleared = [one.assign(tf.zeros_like(one)) for one in sums]
            with tf.control_dependencies(cleared):
                return [tf.identity(one) for one in results]

        with tf.control_dependencies([self._full]):
            chosen = tf.cond(self._full, reduced, lambda: [tf.zeros_like(one) for one in sums])
        results: list[Any] = [None] * len(gradients)
        chosen = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
        order_after(chosen)
        for index, one in zip(there, chosen, strict=True):
            results[index] = one
        return results

    @plain
    def apply(self, apply: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Run ``apply`` in every last pass, else ``skip``; return a tensor that is True."""
        if self.counter is None:
            return apply()

        def true_after(result: Any) -> Any:
            with tf.control_dependencies([] if result is None else [result]):
                return tf.constant(True)

        full = self._full if in_session() else tf.equal(self.counter, 0)
        return tf.cond(full, lambda: true_after(apply()), lambda: true_after(skip()))

    def _sum_of(self, variable: Any, gradient: Any) -> Any:
        """Return the sum of a variable's gradients; None: it has not had one yet."""
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
    """Return (gradient, variable) pairs with reduced gradients, summed over several passes by ``sums``."""
    gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if sums is None:
        return list(zip(reduce(gradients, variables), variables, strict=True))
    if sparse_as_dense:
        gradients = [None if one is None else tf.convert_to_tensor(one) for one in gradients]
    return list(zip(sums.add(gradients, variables, reduce), variables, strict=True))


def _variable(shape: Any, dtype: Any) -> Any:
    with tf.init_scope():  # not in a tf.function, which may make variables in its first trace only
        return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, name=_NAME)
