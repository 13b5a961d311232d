"""Callbacks for ``model.fit``; those that set the learning rate are in ``schedules``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdance import session
from ringdance.errors import ArgumentError, MismatchError
from ringdance.keras.library import build, forms, keras, variables_of
from ringdance.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from ringdance.keras.values import broadcast_variables
from ringdance.training.objects import allgather_json

__all__ = [
    "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback", "ProgressBar", "on_rank_zero",
]

_CHANGE_TRAINING = tuple([
    getattr(keras.callbacks, name)
    for name in (
        "EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler", "TerminateOnNaN", "BackupAndRestore",
        "SwapEMAWeights",  # not in Keras 2
    ) if hasattr(keras.callbacks, name)
])


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the root's model and optimizer, once, when training starts or resumes from a checkpoint.

    This happens before the first step if the model has its variables, else after that step (a subclassed
    model on TensorFlow has none before). Put it first in the list of callbacks.

    Args:
        root_rank: global rank.
        device: accepted and ignored.
        local_variables: variables to leave out.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = list(local_variables or ())
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Leave this variable out."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if all variables exist."""
        if not self.model.built:
            return
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:  # on TensorFlow the first step would do it
            build(optimizer, self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first step, if not done before."""
        if batch:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Broadcast after an epoch of one step, if not done before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self._done:
            return
        self._done = True
        local = set().union(*map(forms, self._local))
        found = [*self.model.variables, *variables_of(getattr(self.model, "optimizer", None))]
        unique = {id(one): one for one in found}.values()
        kept = [one for one in unique if local.isdisjoint(forms(one))]
        broadcast_variables(kept, self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over the ranks, for later callbacks.

    Args:
        device: accepted and ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the metrics in ``logs`` by their averages.

        Raises:
            MismatchError: the ranks have different metrics; raised on all.
        """
        if logs is None or session.engine().size == 1:
            return
        everywhere = allgather_json({name: float(value) for name, value in logs.items()}, "metrics")
        for rank, found in enumerate(everywhere):
            if set(found) != set(everywhere[0]):
                raise MismatchError(
                    f"MetricAverageCallback: rank 0 has the metrics {sorted(everywhere[0])}, rank {rank} "
                    f"({session.engine().hosts[rank]}) has {sorted(found)}. Use the same metrics and "
                    "validation data on all ranks, and put callbacks that add to the logs on all of them."
                )
        for name in sorted(logs):
            logs[name] = sum(found[name] for found in everywhere) / len(everywhere)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model whenever the monitored metric is the best so far; rank 0 alone writes.

    ``MetricAverageCallback`` before it makes all ranks see the same metric.

    Args:
        monitor: name of the metric.
        verbose: 1 prints when it saves.
        save_weights_only: weights instead of the model.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        filepath: where to save; may be set later as an attribute.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, save_weights_only: bool = False,
        mode: str = "auto", save_freq: Any = "epoch", *, filepath: Any = None,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            f"unset{suffix}" if filepath is None else filepath, monitor, verbose, True, save_weights_only,
            mode, save_freq,
        )
        if filepath is None:
            self.filepath = None

    def _save_model(self, epoch: int, batch: Any, logs: Any) -> None:
        if self.filepath is None:
            raise ArgumentError("BestModelCheckpoint has no filepath: set it.")
        if session.engine().rank == 0:
            super()._save_model(epoch, batch, logs)


class ProgressBar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """Keras's progress bar, on rank 0 only; in the list of callbacks it replaces Keras's own."""

    def set_params(self, params: Any) -> None:
        """Set the parameters of ``fit``; silent on other ranks than 0."""
        super().set_params(params)
        if session.engine().rank != 0:
            self.verbose = 0


def on_rank_zero(callback: Any) -> Any:
    """Return a callback of Keras that acts on rank 0 and does nothing on the others.

    For what writes: ``on_rank_zero(keras.callbacks.CSVLogger("log.csv"))``, ``ModelCheckpoint``,
    ``TensorBoard``. Not for what changes training (``EarlyStopping``, ``ReduceLROnPlateau``,
    ``BackupAndRestore``): that has to happen on all ranks alike.

    Raises:
        ArgumentError: this callback changes training.
    """
    if isinstance(callback, _CHANGE_TRAINING):
        raise ArgumentError(
            f"{type(callback).__name__} changes training, so it has to be on all ranks: give it to fit() as "
            "it is, behind MetricAverageCallback, so that all ranks see the same metrics."
        )
    return callback if session.engine().rank == 0 else keras.callbacks.Callback()
