"""Callbacks that set the learning rate by epoch or by batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringdance import session
from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, is_built, keras, number

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` until ``end_epoch``.

    The learning rate of an epoch is written to its logs as ``lr``.

    Args:
        initial_lr: the learning rate to be multiplied.
        multiplier: a function of the epoch, or a constant c, meaning ``c ** (epoch - start_epoch)``.
        start_epoch: the first epoch in which this callback acts.
        end_epoch: the first in which it no longer acts; None: no end.
        staircase: once at the beginning of each epoch; False: in each batch, with a fractional epoch.
        momentum_correction: multiplies the momentum by new/old rate for the batch in which the rate changes.
            Only where a step is not compiled (torch, or ``run_eagerly``): there momentum is a constant.
        steps_per_epoch: needed for ``staircase=False`` if ``fit`` does not know it.

    Raises:
        ArgumentError: ``initial_lr`` is None, or the steps of an epoch are not known.
    """

    def __init__(
        self, initial_lr: float | None, multiplier: float | Callable[[float], float], start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ArgumentError("initial_lr is required: the learning rate that the multiplier multiplies.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._restore: float | None = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            constant = multiplier
            self.multiplier = lambda epoch: constant ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of steps in an epoch."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ArgumentError(
                f"{type(self).__name__} needs steps_per_epoch with staircase=False: fit() does not know it."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, in the first batch or in each."""
        self._restore_momentum()
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
        self._restore_momentum()
        if logs is not None:
            logs["lr"] = number(self.model.optimizer.learning_rate)

    def _set(self, factor: float) -> None:
        optimizer = self.model.optimizer
        old = number(optimizer.learning_rate)
        new = self.initial_lr * factor
        if new == old:
            return
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        # Keras makes no velocities for an optimizer that has no momentum when it is built.
        possible = old and new and self._reads_momentum(inner)
        if self.momentum_correction and possible and getattr(inner, "momentum", 0.0):
            self._restore = number(inner.momentum)
            inner.momentum = self._restore * new / old

    def _reads_momentum(self, optimizer: Any) -> bool:
        """Return whether the next step uses what ``optimizer.momentum`` is set to."""
        if KERAS2 and isinstance(optimizer, keras.optimizers.legacy.Optimizer):
            return True  # there it is a variable
        compiled = keras.backend.backend() != "torch" and not self.model.run_eagerly
        return is_built(optimizer) and not compiled

    def _restore_momentum(self) -> None:
        if self._restore is not None:
            optimizer = self.model.optimizer
            getattr(optimizer, "inner_optimizer", optimizer).momentum = self._restore
            self._restore = None


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch from ``initial_lr / size`` to ``initial_lr``.

    Args:
        initial_lr: the rate for all ranks together: that of one process times the number of ranks.
        warmup_epochs: how many epochs it takes.
        momentum_correction: see LearningRateScheduleCallback.
        steps_per_epoch: see LearningRateScheduleCallback.
        verbose: 1 prints a line on rank 0 at the end.
    """

    def __init__(
        self, initial_lr: float | None, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

        def multiplier(epoch: float) -> float:
            # So that the rate is the full one in the last batch of the warm-up.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            size = session.engine().size
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, start_epoch=0, end_epoch=warmup_epochs, staircase=False,
            momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch,
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the learning rate to the logs; print it at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and session.engine().rank == 0:
            rate = number(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
