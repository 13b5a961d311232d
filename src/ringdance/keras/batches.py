"""Loaders as Keras reads them in ``model.fit``."""

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
    """Sets the loader's epoch to that of ``fit``; the first one keeps its position."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch != self._loader.plan.epoch:
            self._loader.set_epoch(epoch)
        steps = self.params.get("steps")
        if steps != len(self._loader):  # Keras asks once, at the start of fit
            raise ArgumentError(
                f"fit() counts on {steps} batches in each epoch; epoch {epoch} has {len(self._loader)} left. "
                "Finish an epoch that begins in its middle in a fit() of its own, with "
                "epochs=initial_epoch + 1, and do not give steps_per_epoch."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._loader.set_epoch(epoch + 1)


class _Measurement(_Epochs):
    """For ``ringdance bench input``: ``fit`` may read the loader in a thread; steps end in the main one."""

    steps = 1 << 30  # of the only epoch

    def __init__(self, loader: WatchedLoader) -> None:
        super().__init__(loader)
        self._sizes: deque[int] = deque()  # of the batches that were read, and not yet trained with

    def batches(self) -> Iterator[Any]:
        """Yield batches without an end."""
        self._sizes.clear()
        for batch in self._loader.drawn():
            self._sizes.append(samples_of(batch))
            yield batch

    def on_train_begin(self, logs: Any = None) -> None:
        if self._loader.part == "loader":
            for _ in self._loader:  # until it ends the script
                pass
        self._loader.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._loader.count(self._sizes.popleft())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        pass


class BatchSequence(_Sequence):  # type: ignore[misc]
    """What the loaders return: a ``keras.utils.PyDataset`` that is read in its order.

    Args:
        loader: yields ``ringdance.data.Batch``, or ``TableBatch``.
        inputs: returns what the model gets of a batch.

    Attributes:
        loader: the same loader.
        callback: for ``fit``, so that each epoch has its own order.
    """

    def __init__(self, loader: Batches, inputs: Callable[[Any], Any]) -> None:
        super().__init__()
        self.loader, self._inputs = loader, inputs
        self._measurement = _Measurement(loader) if isinstance(loader, WatchedLoader) else None
        self.callback = self._measurement or _Epochs(loader)
        self._batches: Iterator[Any] = iter(())
        self._next = 0

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose the epoch, and after how many samples of its order to begin: before ``fit``."""
        self.loader.set_epoch(epoch, position)

    def position_after(self, batches: int) -> int:
        """Return the position after so many batches of the epoch: that of a checkpoint."""
        return self.loader.position_after(batches)

    def __len__(self) -> int:
        return self._measurement.steps if self._measurement else len(self.loader)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        """Return a batch: inputs, labels (n,), and weights (n,) float32.

        Raises:
            ArgumentError: it is not the batch after the last one, nor the first.
        """
        if index == 0:
            self.loader.leave()
            self._batches, self._next = (self._measurement or self.loader).batches(), 0
        if index != self._next:
            raise ArgumentError(
                f"Batch {index} was asked for, and {self._next} is the next: pass shuffle=False to fit(); "
                "the loader shuffles."
            )
        self._next += 1
        batch = next(self._batches)
        return self._inputs(batch), batch.labels, np.full(len(batch.labels), batch.weight, np.float32)

    def close(self) -> None:
        """End the threads that prepare batches."""
        self.loader.close()


class _Ahead:
    """An epoch of a PyDataset, read by as many threads as it has workers."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        if getattr(self._data, "use_multiprocessing", False):
            raise ArgumentError("A PyDataset cannot be measured with use_multiprocessing=True: leave it out.")
        with ThreadPoolExecutor(max(1, getattr(self._data, "workers", 1))) as pool:
            ahead = deque[Future[Any]]()
            for index in range(len(self._data)):
                ahead.append(pool.submit(self._data.__getitem__, index))
                if len(ahead) >= getattr(self._data, "max_queue_size", 10):
                    yield ahead.popleft().result()
            yield from (one.result() for one in ahead)
        self._data.on_epoch_end()


def _measuring(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' ``fit``, which also takes a watched loader: it reads that as a generator."""

    @functools.wraps(fit)
    def measured(*args: Any, **options: Any) -> Any:
        given = inspect.signature(fit).bind(*args, **options)
        loader = given.arguments.get("x")
        if isinstance(loader, WatchedLoader):
            if isinstance(loader.source, _Sequence):
                loader.source = _Ahead(loader.source)
            measurement = _Measurement(loader)
            if loader.part == "loader":
                measurement.on_train_begin()
            batches = measurement.batches()
            given.arguments["x"] = (tuple(b) if isinstance(b, tuple | list) else (b,) for b in batches)
            given.arguments["shuffle"] = False  # the loader does
            given.arguments["callbacks"] = [measurement, *(given.arguments.get("callbacks") or [])]
        return fit(*given.args, **given.kwargs)

    return measured


if "RINGDANCE_INPUT_CHECK" in os.environ:  # of `ringdance bench input`
    keras.Model.fit = _measuring(keras.Model.fit)
