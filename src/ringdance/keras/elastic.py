"""Elastic training with Keras: the state of a model, and callbacks that commit it within ``fit``.

See ``ringdance.training.elastic`` for what is saved and restored, and when.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, keras, read
from ringdance.keras.values import broadcast_variables
from ringdance.keras.variables import is_complete, optimizers_of, variables_with
from ringdance.training import elastic
from ringdance.training.elastic import ObjectState, State, VariablesState

__all__ = [
    "CommitStateCallback", "KerasState", "ObjectState", "State", "UpdateBatchStateCallback",
    "UpdateEpochStateCallback", "run",
]


T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function whose first argument is a state.

    If a collective fails in a compiled step, the backend raises its own type of error. Training also
    continues after such an error.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from ringdance.tensorflow.elastic import run as run_in_tensorflow

        return run_in_tensorflow(func)
    return elastic.run_translating(func, RuntimeError) if backend == "jax" else elastic.run(func)


class KerasState(VariablesState):
    """A model, its optimizer and plain attributes, committed and restored together.

    Args:
        model: A model whose weights have been created.
        optimizer: An optimizer. The default is the optimizer with which the model was compiled. Optimizers
            that the model has as attributes are always included.
        kwargs: Additional attributes. See ``ObjectState``.

    Raises:
        ArgumentError: The model has no weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ArgumentError("KerasState: the model has no weights yet. Call model.build(shape) first.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        is_complete(model, self.optimizer)  # Creates variables such as momentum, so that they are saved.
        super().__init__(**kwargs)

    def _variables(self) -> list[Any]:
        return variables_with(self.model, [self.optimizer, *optimizers_of(self.model)])

    def _read(self) -> list[Any]:
        self._saved = self._variables()
        return [read(variable) for variable in self._saved]

    def _assign(self, values: list[Any]) -> None:
        saved = {id(variable) for variable in self._saved}
        new_variables = [variable for variable in self._variables() if id(variable) not in saved]
        late = {id(variable) for variable in self.model.variables} & set(map(id, new_variables))
        if late:
            raise ArgumentError(
                f"KerasState: {len(late)} variables were created after the state was saved. Call the model "
                "on a batch before you create KerasState(model)."
            )
        for variable, array in zip(self._saved, values, strict=True):
            variable.assign(array)
        # New variables, such as momentum, belong to an optimizer that was built after the state was saved.
        # They start at zero.
        for variable in new_variables:
            variable.assign(np.zeros_like(read(variable)))
        self._drop_gradients()

    def _broadcast(self) -> None:
        broadcast_variables(self._variables())
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Discard gradients left behind by a failed step, except Keras 3's sums, which are variables."""
        if KERAS2:
            importlib.import_module("ringdance.tensorflow.passes").reset_sums()
        elif keras.backend.backend() == "torch":
            for variable in self.model.trainable_variables:
                variable.value.grad = None


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base class of callbacks that hold a state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits the state every ``batches_per_commit`` batches and at the end of each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._next = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the batch count."""
        self._next = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if at least ``batches_per_commit`` batches were trained since the last commit."""
        if self.batches_per_commit and batch + 1 >= self._next:
            self.state.commit()
            self._next = batch + 1 + self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the state."""
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Stores the batch number in ``state.batch``, or 0 after an epoch. Put it before CommitStateCallback."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store the batch number."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set the batch number to 0."""
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Stores the number of finished epochs in ``state.epoch``, which is kept across restarts.

    Put it before ``CommitStateCallback``.
    Both ``fit(initial_epoch=state.epoch, epochs=n)`` and ``fit(epochs=n - state.epoch)`` train n epochs.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count an epoch. ``epoch`` is not used, because Keras may restart from 0 in each call to ``fit``."""
        self.state.epoch += 1
