"""Elastic training, which continues after errors: ``hvd.elastic.run`` and states for TensorFlow.

See ``ringdance.training.elastic`` for what is saved and restored, and when.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ringdance.errors import ArgumentError
from ringdance.tensorflow.gradients import variable_of
from ringdance.tensorflow.passes import reset_sums
from ringdance.tensorflow.state import broadcast_variables
from ringdance.training import elastic
from ringdance.training.elastic import ObjectState, State, VariablesState

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function whose first argument is a state.

    Training also continues after a collective has failed within a ``tf.function``.
    """
    return elastic.run_translating(func, tf.errors.OpError)


class TensorFlowState(VariablesState):
    """Variables and plain attributes, committed and restored together.

    Args:
        variables: TensorFlow or Keras variables. Optional in a ``tf.compat.v1`` graph, where the
            default is all global variables.
        session: A ``tf.compat.v1`` session, or None in eager execution.
        kwargs: Additional attributes.

    Raises:
        ArgumentError: No variables are passed in eager execution.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None:
            if session is None and tf.executing_eagerly():
                raise ArgumentError("TensorFlowState needs variables. Pass, for example, model.variables.")
            variables = tf.compat.v1.global_variables()
        self._session = session
        self._listed = list(variables)
        self._operation: Any = None
        super().__init__(**kwargs)

    def _read(self) -> list[Any]:
        if self._session is not None:
            return self._session.run(self._listed)
        return [np.array(variable_of(variable).numpy()) for variable in self._listed]

    def _assign(self, values: list[Any]) -> None:
        for variable, value in zip(map(variable_of, self._listed), values, strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                variable.assign(value)
        reset_sums(self._session)

    def _broadcast(self) -> None:
        if self._operation is None:  # In eager execution, the call broadcasts and returns None.
            self._operation = broadcast_variables(self._listed, 0)
        if self._session is not None:
            self._session.run(self._operation)


class TensorFlowKerasState:
    """A ``ringdance.keras.elastic.KerasState``. ``backend`` is accepted but has no effect."""

    def __new__(cls, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        """Create the state. Keras is imported here, so that the TensorFlow binding works without it."""
        keras: Any = importlib.import_module("ringdance.keras")
        return object.__new__(type(cls.__name__, (cls, keras.elastic.KerasState), {}))

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        state: Any = super()
        state.__init__(model, optimizer, **kwargs)
