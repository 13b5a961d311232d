"""Wrap loaders as Keras PyDatasets for ``model.fit``, and measure them for ``ringdance bench input``."""

from __future__ import annotations

import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ringdance.data.batches import Batches
from ringdance.errors import ArgumentError
from ringdance.keras.library import KERAS2, keras
from ringdance.training.loaders.input_check import WatchedLoader, samples_of

_Sequence: Any = keras.utils.Sequence if KERAS2 else keras.utils.PyDataset


class _Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the loader's epoch to the epoch of ``fit``. The first epoch starts at the loader's position."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch != self._loader.plan.epoch:
            self._loader.set_epoch(epoch)
        steps = self.params.get("steps")
        if steps != len(self._loader):  # Keras reads the length only once, when fit starts.
            raise ArgumentError(
                f"fit() expects {steps} batches per epoch, but epoch {epoch} has {len(self._loader)} left. "
                "To resume in the middle of an epoch, finish it in a separate fit() call with "
                "epochs=initial_epoch + 1, and do not pass steps_per_epoch."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._loader.set_epoch(epoch + 1)


class _Measurement(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps for ``ringdance bench input`` in the main thread, even if another thread reads batches."""

    steps = 1 << 30  # Length of the only epoch, which the measurement never reaches.

    def __init__(self, loader: WatchedLoader) -> None:
        super().__init__()
        self._loader = loader
        self._sizes: deque[int] = deque()  # Sizes of batches that have been read but not trained on.

    def batches(self) -> Iterator[Any]:
        """Yield an endless sequence of batches, and record their sizes."""
        self._sizes.clear()
        for batch in self._loader.drawn():
            self._sizes.append(samples_of(batch))
            yield batch

    def on_train_begin(self, logs: Any = None) -> None:
        if self._loader.part == "loader":
            for _ in self._loader:  # Raises SystemExit after the measurement.
                pass
        self._loader.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._loader.count(self._sizes.popleft())


class BatchSequence(_Sequence):  # type: ignore[misc]
    """A ``keras.utils.PyDataset`` that must be read in order. The functions in ``loaders`` return it.

    Args:
        loader: Loader of ``ringdance.data.Batch`` or ``TableBatch`` objects.
        inputs: Function that returns the model's input for a batch.

    Attributes:
        loader: The loader that was passed as an argument.
        callback: Callback to pass to ``fit``. It sets the loader's epoch, so the order differs in each epoch.
    """

    def __init__(self, loader: Batches, inputs: Callable[[Any], Any]) -> None:
        super().__init__()
        self.loader, self._inputs = loader, inputs
        self._measurement = _Measurement(loader) if isinstance(loader, WatchedLoader) else None
        self.callback = self._measurement or _Epochs(loader)
        self._batches: Iterator[Any] = iter(())
        self._next = 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Set the epoch, and the number of samples to skip at its start. Call this before ``fit``."""
        self.loader.set_epoch(epoch, position)

    def position_after(self, batches: int) -> int:
        """Return the loader's position after ``batches`` batches of the epoch, to save in a checkpoint."""
        return self.loader.position_after(batches)

    def __len__(self) -> int:
        return self._measurement.steps if self._measurement else len(self.loader)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        """Return a batch: inputs, labels (n,), and weights (n,) as float32.

        Raises:
            ArgumentError: ``index`` is neither 0 nor the index that follows the previous batch.
        """
        if index == 0:
            self.loader.leave()
            self._batches, self._next = (self._measurement or self.loader).batches(), 0
        if index != self._next:
            raise ArgumentError(
                f"Batch {index} was requested, but batches must be read in order, and the next batch is "
                f"{self._next}. Pass shuffle=False to fit(), because the loader itself shuffles."
            )
        self._next += 1
        batch = next(self._batches)
        return self._inputs(batch), batch.labels, np.full(len(batch.labels), batch.weight, np.float32)

    def close(self) -> None:
        """Stop the threads that prepare batches."""
        self.loader.close()


class _Ahead:
    """Prefetches an epoch of a PyDataset, with one thread for each of the PyDataset's workers."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        if getattr(self._data, "use_multiprocessing", False):
            raise ArgumentError(
                "`ringdance bench input` cannot measure a PyDataset with use_multiprocessing=True. Set it to "
                "False."
            )
        with ThreadPoolExecutor(max(1, getattr(self._data, "workers", 1))) as pool:
            ahead = deque[Future[Any]]()
            for index in range(len(self._data)):
                ahead.append(pool.submit(self._data.__getitem__, index))
                if len(ahead) >= getattr(self._data, "max_queue_size", 10):
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)
        self._data.on_epoch_end()


def _measuring(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper around Keras's ``fit`` that measures the input if it is a ``WatchedLoader``."""

    @functools.wraps(fit)
    def measured(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(fit).bind(*args, **options)
        loader = bound.arguments.get("x")
        if isinstance(loader, WatchedLoader):
            if isinstance(loader.source, _Sequence):
                loader.source = _Ahead(loader.source)
            measurement = _Measurement(loader)
            if loader.part == "loader":
                measurement.on_train_begin()
            batches = measurement.batches()
            bound.arguments["x"] = (tuple(b) if isinstance(b, tuple | list) else (b,) for b in batches)
            bound.arguments["shuffle"] = False  # The loader itself shuffles.
            bound.arguments["callbacks"] = [measurement, *(bound.arguments.get("callbacks") or [])]
        return fit(*bound.args, **bound.kwargs)

    return measured


if "RINGDANCE_INPUT_CHECK" in os.environ:  # Set by `ringdance bench input`.
    keras.Model.fit = _measuring(keras.Model.fit)
