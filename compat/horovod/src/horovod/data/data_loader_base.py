"""Data loaders that prepare batches ahead in a thread."""

from __future__ import annotations

import abc
import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

from ringdance.errors import ArgumentError

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_log = logging.getLogger("ringdance")

_POLL_SECONDS = 0.1  # How often a thread with a full queue checks whether the loader was closed.


class BaseDataLoader(abc.ABC):
    """Base class of loaders. Subclasses define the batches and their number."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abc.abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, each processed by ``_process_batch``."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Return the value to yield for a batch. Runs in the iterating thread."""
        return batch


class _Failed:
    """An exception from the loader thread, to be raised in the iterating thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Runs a loader's ``_iterate`` ahead in a thread, epoch after epoch.

    Put it before the loader in the list of bases::

        class Loader(AsyncDataLoaderMixin, PlainLoader): ...

        loader = Loader(async_loader_queue_size=8, ...)   # The other arguments go to PlainLoader.

    An exception in the thread is raised in the iterating thread. The loader thread is a daemon thread.
    ``close_async_loader`` stops it before the process exits.

    Args:
        async_loader_queue_size: Maximum number of batches in the queue, including batches of the next epoch.
            0 disables the thread.
        debug_data_loader: Log the start and end of each epoch.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if async_loader_queue_size < 0:
            raise ArgumentError(f"async_loader_queue_size={async_loader_queue_size} must be 0 or more.")
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._ahead: queue.Queue[Any] = queue.Queue(async_loader_queue_size)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of an epoch whose iteration was interrupted."""
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(
                target=self._work, name=f"{type(self).__name__} ahead", daemon=True
            )
            self._thread.start()
        while True:
            batch = self._ahead.get()
            if batch is None:
                return
            if isinstance(batch, _Failed):
                self.close_async_loader()
                raise batch.error
            yield self._process_batch(batch)  # type: ignore[attr-defined]

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                if self.debug_data_loader:
                    _log.warning("ringdance: %s: starting an epoch.", threading.current_thread().name)
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put(batch):
                        return
                if self.debug_data_loader:
                    _log.warning("ringdance: %s: finished loading an epoch.", threading.current_thread().name)
                self._put(None)
        except BaseException as error:
            self._put(_Failed(error))

    def _put(self, batch: Any) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put(batch, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                pass
        return False

    def close_async_loader(self) -> None:
        """Stop the thread and drop the batches it has loaded. Iterating afterwards starts again."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._ahead = queue.Queue(self.async_loader_queue_size)
