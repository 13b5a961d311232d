"""Reduce the gradients of a step together, for tapes and optimizers.

Dense gradients are divided into buckets by size, starting with the last variable, because the backward pass
computes gradients in reverse order. The rows of all IndexedSlices are exchanged together afterwards. In a
graph, each bucket is submitted as soon as its gradients are computed, and one operation waits for all
buckets. The buckets depend only on the variables, so they are the same on all ranks. Whether a bucket is
exchanged while other gradients are being computed (``overlap``) may differ between ranks.
"""

from __future__ import annotations

import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ringdance.core import labels
from ringdance.core.recorder import StepMark
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError
from ringdance.settings import level_of_caller
from ringdance.tensorflow._private import in_xla_context
from ringdance.tensorflow.compression import Compression
from ringdance.tensorflow.exchange import (
    in_session,
    number,
    order_after,
    perform,
    perform_all,
    plain,
    reduce_rows,
    unique_in_session,
)
from ringdance.training import session
from ringdance.training.checks import pick_operation
from ringdance.training.collectives import Call, prepared
from ringdance.training.gradients import weights
from ringdance.training.gradients.buckets import parts_of
from ringdance.training.gradients.lists import UseOrder, pattern_of, reduce_shared
from ringdance.training.gradients.options import check_groups, scales_of
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id, takes_part

Tensor = Any


_order = UseOrder()


def variable_of(one: Any) -> Any:
    """Return the TensorFlow variable behind a Keras variable. Anything else is returned unchanged."""
    if isinstance(one, tf.Variable) or not hasattr(one, "value"):
        return one
    return one.value() if callable(one.value) else one.value


def groups_of(groups: Any, num_groups: int) -> Any:
    """Return ``groups`` or, with a deprecation warning, ``num_groups``."""
    if not num_groups:
        return groups
    warnings.warn("num_groups is deprecated. Use groups=<number>.", DeprecationWarning, level_of_caller())
    return num_groups if groups is None else groups


class GradientReducer:
    """Reduces lists of gradients over the ranks.

    Args:
        name: Name of the tape or optimizer, used as the prefix of exchange names.
        compression: Compression of dense gradients in the exchange.
        sparse_as_dense: If True, reduce IndexedSlices as dense tensors.
        op: Reduction operation, such as Average or Sum.
        predivide: Gradients are divided by this factor before the sum, and the sum is multiplied by it
            (Average only).
        groups: ``None``, the number of groups, or lists of variables whose gradients are reduced together.
        process_set: The participating ranks.
        scale_local_gradients: If True, gradients of local variables are divided by the number of ranks.
        device_dense, device_sparse: Devices on which dense gradients and IndexedSlices enter the exchange.
        step_mark: Mark for the end of a step, set when the last exchange completes. See ``StepMark``.

    Raises:
        ArgumentError: An argument is invalid, or arguments cannot be combined.
    """

    def __init__(
        self, name: str, *, compression: Any = Compression.none, sparse_as_dense: bool = False,
        op: int = ReduceOp.AVERAGE, predivide: float = 1.0, groups: Any = None,
        process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
        device_dense: str = "", device_sparse: str = "", step_mark: StepMark = StepMark.OPTIMIZER,
    ) -> None:
        self.name = name
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.operation = pick_operation(None, op)
        self.scales = scales_of(self.operation, predivide)
        check_groups(groups, [], lambda one: None)
        group_items = [item for part in groups for item in part] if isinstance(groups, (list, tuple)) else []
        if not all(hasattr(item, "shape") for item in group_items):
            raise ArgumentError(f"groups={groups!r} is invalid. Use a positive number or lists of variables.")
        self.groups = groups
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.devices = device_dense, device_sparse
        self.step_mark = step_mark
        self.local: set[int] = set()
        self.advice = "hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)"

    def register_local(self, variable: Any) -> None:
        """Exclude this variable's gradient from the reduction."""
        self.local.add(id(variable_of(variable)))

    def is_local(self, variable: Any) -> bool:
        """Return True if the variable is registered as local."""
        return id(variable_of(variable)) in self.local

    @plain
    def reduce(self, gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[Tensor]:
        """Return the reduced gradients in the order of ``gradients``. ``None`` stays ``None``.

        Args:
            gradients: Tensors, IndexedSlices or ``None``, in the same pattern on all ranks.
            variables: The variable of each gradient, in the same order on all ranks.
        """
        if not takes_part(self.process_set):
            self._mark_step()
            return list(gradients)
        share = 1 / (self.process_set.size() or 1) if self.scale_local_gradients else 1.0
        return reduce_shared(self._reduce, gradients, variables, self.is_local, share)

    def _mark_step(self) -> None:
        """Mark the end of a step without an exchange. Has no effect in a session, which would not run it."""
        if tf.executing_eagerly():
            session.mark_step(self.step_mark)
            return
        graph = tf.compat.v1.get_default_graph()
        if graph.building_function and not in_xla_context(graph):
            number("step", self.step_mark)

    def _reduce(self, gradients: Sequence[Tensor], variables: Sequence[Any]) -> list[Tensor]:
        results = list(gradients)
        if self.sparse_as_dense:
            results = [value if value is None else tf.convert_to_tensor(value) for value in results]
        kinds = [_kind(gradient) for gradient in results]
        sparse = [index for index, kind in enumerate(kinds) if kind == "rows"]
        dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
        key = self._key(variables)
        call = partial(self._call, key, pattern_of(kinds))
        with tf.name_scope(f"{self.name}_Allreduce"):
            if dense:
                with tf.device(self.devices[0]):
                    self._reduce_dense(results, dense, variables, call, last=not sparse)
            if sparse:
                first = [results[dense[0]]] if dense and in_session() else []  # See perform_all.
                with tf.device(self.devices[1]), tf.control_dependencies(first):
                    named = call("rows" if dense else 0, True, [variables[index] for index in sparse])
                    self._reduce_sparse(results, sparse, variables, named)
            if not dense and not sparse and variables:  # Other ranks may have gradients to reduce.
                perform(call(0, True), [tf.zeros(1)])
            self._compare_weights(key, [variables[index] for index in sorted([*dense, *sparse])])
        return results

    def _compare_weights(self, key: str, variables: Sequence[Any]) -> None:
        """Compare the ranks' variables if a comparison is due. See ``training.gradients.weights``."""
        named = [(_name_of(variable), variable_of(variable)) for variable in variables]
        named = [
            (name, variable) for name, variable in named
            if isinstance(variable, tf.Variable) and (variable.dtype.is_floating or variable.dtype.is_complex)
            and variable.shape.is_fully_defined()
        ]
        names, floats = [name for name, _ in named], [variable for _, variable in named]
        if not floats or in_session():  # A session does not run operations in program order.
            return
        call = weights.call_of(key, names, self.advice, set_id(self.process_set))

        def take(one: Any) -> tuple[int, Tensor]:
            if one.dtype.is_complex:
                one = tf.stack([tf.math.real(one), tf.math.imag(one)])
            size = math.prod(one.shape)
            return size, tf.cast(tf.reshape(one, [-1])[:: weights.step_of(size)], tf.float32)

        def compare() -> Tensor:
            parts = [*weights.rows_of(floats, take)]
            return tf.size(perform(call, [tf.stop_gradient(tf.concat(parts, 0))])[0])

        due = tf.cast(number("weights", f"{call.set_id}:{key}"), tf.bool)
        order_after([tf.cond(due, compare, lambda: 0)])

    def _key(self, variables: Sequence[Any]) -> str:
        # In the main thread, keys must match even if shapes differ by mistake, so that the error shows the
        # shapes. Other threads may run in any order, so their keys contain the shapes to distinguish models.
        shape = len if threading.current_thread() is threading.main_thread() else tuple
        described = repr([(shape(item.shape), tf.as_dtype(item.dtype).name) for item in variables])
        key = f"{self.name}.{hashlib.blake2b(described.encode(), digest_size=4).hexdigest()}"
        if in_session():  # A session may run two exchanges at the same time.
            return unique_in_session(key)
        last = variable_of(variables[-1]) if variables else None
        if not isinstance(last, tf.Variable):
            return key
        number = _order.number((key, set_id(self.process_set)), last)
        return f"{key}.{number}" if number else key

    def _call(self, key: str, pattern: str, part: int | str, last: bool, tensors: Sequence[Any] = ()) -> Call:
        """Return the call for one part of a step's gradients. The first part is always named ``<key>.0``.

        ``tensors`` contains the variables whose gradients are reduced, for error messages.
        """
        fields = (Collective.ALLREDUCE, f"{key}.{part}", self.operation, *self.scales)
        mark = self.step_mark if last else StepMark.NONE
        if tensors:
            labels.note(f"grouped_allreduce.{key}.{part}", key, "gradients", list(map(_name_of, tensors)))
        return prepared(*fields, set_id(self.process_set), -1, True, step_mark=mark, pattern=pattern)

    def _reduce_dense(
        self, results: list[Tensor], dense: list[int], variables: Sequence[Any],
        call: Callable[[int, bool, Sequence[Any]], Call], last: bool,
    ) -> None:
        index_of = {id(variable_of(variables[index])): index for index in dense}
        groups = check_groups(self.groups, dense, lambda one: index_of.get(id(variable_of(one))))
        grouped = {index for group in groups for index in group}
        rest = [index for index in dense if index not in grouped]
        buckets = [list(group) for group in groups]
        buckets += parts_of(rest, lambda index: _nbytes(variables[index]))
        pairs = {index: self.compression.compress(results[index]) for index in dense}
        calls = [
            (
                call(number, last and bucket is buckets[-1], [variables[index] for index in bucket]),
                [pairs[index][0] for index in bucket],
            )
            for number, bucket in enumerate(buckets)
        ]
        for bucket, tensors in zip(buckets, perform_all(calls), strict=True):
            for index, tensor in zip(bucket, tensors, strict=True):
                results[index] = self.compression.decompress(tensor, pairs[index][1])

    def _reduce_sparse(
        self, results: list[Tensor], sparse: list[int], variables: Sequence[Any], call: Call
    ) -> None:
        if self.operation not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise NotImplementedError(
                f"Gradients that are IndexedSlices cannot be reduced by {self.operation.name.title()}. Use "
                "Average or Sum, or set sparse_as_dense=True."
            )
        names = [str(getattr(variable_of(variables[index]), "name", index)) for index in sparse]
        shapes = [variable_of(variables[index]).shape for index in sparse]
        tables = [shape[0] for shape in shapes]
        call = call.but(pattern=f"{call.pattern} of shape {', '.join(map(str, shapes))}")
        reduced = reduce_rows(call, [results[index] for index in sparse], names, perform, tables)
        for index, gradient in zip(sparse, reduced, strict=True):
            results[index] = gradient


def _kind(gradient: Tensor) -> str:
    """Return "none", "rows" (for IndexedSlices) or "dense", as ``pattern_of`` expects."""
    return "none" if gradient is None else "rows" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", getattr(variable_of(variable), "name", "?")))


def _nbytes(variable: Any) -> int:
    elements = math.prod(int(length or 1) for length in variable.shape)
    return elements * int(tf.as_dtype(variable.dtype).size)
