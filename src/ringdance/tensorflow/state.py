"""Broadcast variables and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ringdance.tensorflow.errors import as_tensorflow
from ringdance.tensorflow.gradients import variable_of
from ringdance.tensorflow.operations import broadcast_
from ringdance.training import objects
from ringdance.training.checks import is_gradient_sum, is_random_state
from ringdance.training.process_sets import ProcessSet, global_process_set

__all__ = [
    "BroadcastGlobalVariablesHook", "allgather_object", "broadcast_global_variables", "broadcast_object",
    "broadcast_object_fn", "broadcast_variables",
]


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assign the values of global rank ``root_rank`` to TensorFlow or Keras variables, except random seeds.

    All ranks must pass the same number of variables. Between the passes of a step, each rank keeps its own
    gradient sums (Keras 3), unless they are all zero. ``inplace`` is accepted but has no effect: values are
    always assigned.

    Returns:
        ``None``. In a ``tf.compat.v1`` graph, the operation to run.
    """
    chosen = [variable for variable in variables if not is_random_state(variable)]
    sums = [variable_of(variable) for variable in chosen if is_gradient_sum(variable)]
    before = [tf.identity(variable) for variable in sums]
    assigned = broadcast_(list(map(variable_of, chosen)), root_rank, "broadcast_variables", process_set)
    has_own = sums and tf.reduce_any([tf.reduce_any(value != 0) for value in before])
    for variable, value in zip(sums, before, strict=True):
        variable.assign(tf.where(has_own, value, variable))
    return None if tf.compat.v1.executing_eagerly_outside_functions() else tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that broadcasts all global variables of a ``tf.compat.v1`` graph.

    Raises:
        RuntimeError: Called in eager execution, which has no collection of global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() works only in tf.compat.v1 graphs. In eager execution, use "
            "hvd.broadcast_variables(model.variables, root_rank=0) after the first step."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all variables when a ``tf.compat.v1.train.MonitoredTrainingSession`` starts.

    Args:
        root_rank: Global rank of the root, which may be the only rank that has loaded a checkpoint.
        device: Device of the broadcast operation.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Create the broadcast operation, once per graph."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast operation."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object, which must be picklable by cloudpickle. ``session`` has no effect."""
    with as_tensorflow():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that takes an object and calls ``broadcast_object`` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all members in rank order. Types and sizes may differ between ranks."""
    with as_tensorflow():
        return objects.allgather_object(obj, name, process_set)
