"""Callbacks for ``model.fit``."""

from __future__ import annotations

import math
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ringdance.errors import ArgumentError, MismatchError
from ringdance.keras.library import forms, keras, number
from ringdance.keras.rates import set_learning_rate
from ringdance.keras.values import broadcast_variables
from ringdance.keras.variables import is_complete, optimizers_of, variables_with
from ringdance.settings import level_of_caller
from ringdance.training import session
from ringdance.training.objects import allgather_json

__all__ = [
    "BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "MetricAverageCallback",
]

_PATHS = {"ModelCheckpoint": "filepath", "BackupAndRestore": "backup_dir"}  # Each callback's path attribute.
_PATHS |= {"CSVLogger": "filename", "TensorBoard": "log_dir"}


def _written() -> dict[str, str]:
    """Map each path to which the current ``fit`` writes on this rank to the class of the callback."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None)]
    lists = [caller.callbacks for caller in callers if isinstance(caller, keras.callbacks.CallbackList)]
    return {
        os.path.abspath(getattr(callback, attribute)): name
        for callback in (lists[0] if lists else ()) if not isinstance(callback, BestModelCheckpoint)
        for name, attribute in _PATHS.items() if isinstance(callback, getattr(keras.callbacks, name))
    }


def _check_written(everywhere: list[dict[str, str]]) -> None:
    """Check that no two ranks on a host write to the same path.

    Raises ArgumentError for ``BackupAndRestore``, and warns about other callbacks.
    """
    engine = session.engine()
    users: dict[tuple[str, str, str], list[int]] = {}
    for rank, written in enumerate(everywhere):
        for place in written.items():
            users.setdefault((*place, engine.hosts[rank]), []).append(rank)
    for (path, name, host), ranks in users.items():
        text = f"{name} writes to {path} on ranks {ranks} of {host}, so they overwrite each other's files. "
        if len(ranks) > 1 and name == "BackupAndRestore":
            raise ArgumentError(text + _EACH_ITS_OWN)
        if len(ranks) > 1 and engine.rank == ranks[0]:
            text += "Add the callback only on rank 0: "
            text += f"if hvd.rank() == 0: callbacks.append(keras.callbacks.{name}(...))."
            warnings.warn(text, stacklevel=level_of_caller())


_EACH_ITS_OWN = (
    "BackupAndRestore must restore all ranks. Give each rank its own directory, for example "
    'keras.callbacks.BackupAndRestore(f"backup-{hvd.rank()}").'
)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the root's model and optimizers when training starts or resumes from a checkpoint.

    The broadcast happens before the first step. It is repeated after that step if a layer or an optimizer on
    some rank had no variables until then. This can happen with layers that a subclassed model has not called
    yet, and with optimizers that are attributes of the model. Put this callback first in the list. It also
    warns if callbacks on several ranks of a host write to the same path.

    Args:
        root_rank: Global rank of the root.
        device: Accepted but has no effect.
        local_variables: Variables that are not broadcast.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = list(local_variables or ())
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Exclude this variable from the broadcast."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables that exist on all ranks.

        Raises:
            ArgumentError: Ranks on one host share a directory for ``BackupAndRestore``. Raised on all ranks.
        """
        if self._done:
            return
        complete = is_complete(self.model, getattr(self.model, "optimizer", None))
        choices = [self._variables(optimizers_of(self.model)), self._variables([])]
        everywhere = allgather_json([complete, *map(len, choices), _written()], "broadcast")
        _check_written([entry[-1] for entry in everywhere])
        for place, variables in enumerate(choices, 1):
            if len({entry[place] for entry in everywhere}) == 1:
                broadcast_variables(variables, self.root_rank)
                break
        self._done = all(entry[0] for entry in everywhere)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Repeat the broadcast after the first step if some variables did not exist before it."""
        if batch:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Repeat the broadcast after an epoch of one step if some variables did not exist before it."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self._done:
            self._done = True
            broadcast_variables(self._variables(optimizers_of(self.model)), self.root_rank)

    def _variables(self, optimizers: Sequence[Any]) -> list[Any]:
        local = set().union(*map(forms, self._local))
        variables = variables_with(self.model, optimizers)
        return [variable for variable in variables if local.isdisjoint(forms(variable))]


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over the ranks, for callbacks that come later in the list.

    Args:
        device: Accepted but has no effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace the metrics in ``logs`` with their averages.

        Raises:
            MismatchError: The ranks have different metrics. Raised on all ranks.
        """
        if logs is None or session.engine().size == 1:
            return
        everywhere = allgather_json({name: float(value) for name, value in logs.items()}, "metrics")
        for rank, metrics in enumerate(everywhere):
            if set(metrics) != set(everywhere[0]):
                raise MismatchError(
                    f"MetricAverageCallback: rank 0 has the metrics {sorted(everywhere[0])}, but rank {rank} "
                    f"({session.engine().hosts[rank]}) has {sorted(metrics)}. Use the same metrics and "
                    "validation data on all ranks, and use callbacks that add to the logs on all ranks."
                )
        for name in sorted(logs):
            logs[name] = sum(metrics[name] for metrics in everywhere) / len(everywhere)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model whenever the monitored metric is the best so far. Only rank 0 writes the file.

    Put ``MetricAverageCallback`` before it, so that all ranks have the same value of the metric.

    Args:
        monitor: Name of the metric.
        verbose: If 1, print a line for each save.
        save_weights_only: If True, save only the weights instead of the whole model.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        filepath: Path to save to. Can also be set later, as an attribute.
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
            raise ArgumentError("BestModelCheckpoint has no path to save to. Set its filepath attribute.")
        if session.engine().rank == 0:
            super()._save_model(epoch, batch, logs)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` until ``end_epoch``.

    The learning rate of each epoch is written to the epoch's logs as ``lr``.

    Args:
        initial_lr: The base learning rate, which is multiplied by ``multiplier(epoch)``.
        multiplier: A function of the epoch, or a constant c, which means ``c ** (epoch - start_epoch)``.
        start_epoch: The first epoch in which the callback sets the rate.
        end_epoch: The first epoch in which it no longer sets the rate. None means no end.
        staircase: If True, set the rate once at the beginning of each epoch. Otherwise, set it in each batch,
            with a fractional epoch.
        momentum_correction: Passed to ``set_learning_rate``.
        steps_per_epoch: Number of steps per epoch. Required for ``staircase=False`` if ``fit`` cannot
            determine it from the data.

    Raises:
        ArgumentError: ``initial_lr`` is None, or the number of steps per epoch is not known.
    """

    def __init__(
        self, initial_lr: float | None, multiplier: float | Callable[[float], float], start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ArgumentError("initial_lr is required. Pass the learning rate that the multiplier scales.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            constant = multiplier
            self.multiplier = lambda epoch: constant ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of steps per epoch."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ArgumentError(
                f"{type(self).__name__} with staircase=False needs the number of steps per epoch, which "
                "fit() cannot determine from this data. Pass steps_per_epoch to the callback."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch number."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate in each batch or, with ``staircase``, in the first batch of the epoch."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(self.multiplier(epoch))
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.multiplier(epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = number(self.model.optimizer.learning_rate)

    def _set(self, factor: float) -> None:
        set_learning_rate(self.model.optimizer, self.initial_lr * factor, self.momentum_correction)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, batch by batch.

    With ``steps_per_execution``, all steps of an execution use the rate of its first step.

    Args:
        initial_lr: The target rate, which is the rate for a single process times the number of ranks.
        warmup_epochs: Duration of the warm-up in epochs.
        momentum_correction: Passed to ``set_learning_rate``.
        steps_per_epoch: Passed to ``LearningRateScheduleCallback``.
        verbose: If 1, rank 0 prints a line at the end of the warm-up.
    """

    def __init__(
        self, initial_lr: float | None, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

        def multiplier(epoch: float) -> float:
            # The full rate is reached in the last batch of the warm-up.
            part = min(1.0, (epoch + 1.0 / (self.steps_per_epoch or 1)) / warmup_epochs)
            size = session.engine().size
            return (1.0 + part * (size - 1)) / size

        super().__init__(
            initial_lr, multiplier, start_epoch=0, end_epoch=warmup_epochs, staircase=False,
            momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch,
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the learning rate to the logs. At the end of the warm-up, set the full rate and print it."""
        if epoch == math.ceil(self.warmup_epochs) - 1:
            # The rate of the last batch is not set if an execution of several steps began before that batch.
            self.model.optimizer.learning_rate = self.initial_lr
            if self.verbose > 0 and session.engine().rank == 0:
                print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self.initial_lr:g}.")
        super().on_epoch_end(epoch, logs)
