"""Data loaders that prefetch: order, epochs, errors and shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from ringdance.errors import ArgumentError


class Numbers(BaseDataLoader):
    def __init__(self, length: int, fail_at: int = -1) -> None:
        self.length, self.fail_at = length, fail_at
        self.epochs = 0
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.length

    def _iterate(self) -> Iterator[Any]:
        self.epochs += 1
        epoch = self.epochs
        for number in range(self.length):
            self.threads.add(threading.get_ident())
            if number == self.fail_at and epoch == 2:
                raise OSError("the disk is gone")
            yield epoch, number

    def _process_batch(self, batch: Any) -> Any:
        return (*batch, threading.get_ident())


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


def epoch_of(number: int, length: int) -> list[tuple[int, int, int]]:
    return [(number, item, threading.get_ident()) for item in range(length)]


@pytest.mark.parametrize("size", [0, 1, 64])
def test_epochs_in_their_order(size: int) -> None:
    loader = Ahead(async_loader_queue_size=size, length=5)
    assert len(loader) == 5
    for epoch in (1, 2, 3):
        assert list(loader) == epoch_of(epoch, 5)  # processed in this thread
    loader.close_async_loader()
    assert (threading.get_ident() in loader.threads) is (size == 0)
    assert loader.epochs == 3 if size == 0 else loader.epochs >= 3


def test_arguments_by_position() -> None:
    loader = Ahead(4, False, 2)
    assert list(loader) == epoch_of(1, 2)
    loader.close_async_loader()
    with pytest.raises(ArgumentError, match="async_loader_queue_size=-1"):
        Ahead(-1, False, 2)


@pytest.mark.parametrize("size", [0, 1, 64])
def test_an_error_is_raised_where_the_loader_is_used(size: int) -> None:
    loader = Ahead(size, False, 4, fail_at=2)
    assert list(loader) == epoch_of(1, 4)
    second = iter(loader)
    assert [next(second), next(second)] == epoch_of(2, 4)[:2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(second)
    assert list(loader) == epoch_of(3, 4)  # starts again
    loader.close_async_loader()


def test_closing_in_the_middle_ends_the_thread() -> None:
    loader = Ahead(1, True, 1000)
    batches = iter(loader)
    assert next(batches)[:2] == (1, 0)
    thread = loader._thread
    assert thread is not None
    assert thread.is_alive()
    loader.close_async_loader()
    assert not thread.is_alive()
    loader.close_async_loader()
    assert next(iter(loader))[:2] == (2, 0)
    loader.close_async_loader()
