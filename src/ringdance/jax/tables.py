"""Batches of a table as arrays of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ringdance.data.tables import Table, TableBatch, TableLoader
from ringdance.training.loaders.input_check import watch_training
from ringdance.training.loaders.pipes import PipeLoader
from ringdance.training.loaders.tables import make_table_loader

__all__ = ["pipe_loader", "table_loader"]


def table_loader(table: Table, batch_size: int, *, device: Any = None, **options: Any) -> TableLoader:
    """Return a loader of this rank's part of each batch, as arrays of JAX.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.TableBatch``; ids are int32 unless JAX has 64-bit types enabled. The last
    batch of an epoch may be shorter, and compiles a function once more.

    Args:
        table: a ``ringdance.data.Table``.
        batch_size: rows for each rank in each batch.
        device: a device or sharding of JAX; by default the first device.
        options: those of ``ringdance.data.TableLoader``: ``shuffle``, ``seed``, ``threads``, ``prefetch``;
            and ``process_set``.
    """
    loader = make_table_loader(table, batch_size, **options)
    loader.convert = _converter(device)
    return watch_training(loader)


def _converter(device: Any) -> Callable[[TableBatch], TableBatch]:
    return lambda batch: batch.converted(lambda array: jax.device_put(array, device))


def pipe_loader(channel: str, batch_size: int, *, device: Any = None, **options: Any) -> PipeLoader:
    """Return a loader of the rows that come from a channel in SageMaker's Pipe mode, as arrays of JAX.

    A collective call. Each iteration reads the next pipe of the channel, of which each rank of a host has
    one, to its end: see the ``pipe_loader`` of ``ringdance.numpy``.

    Args:
        channel: its name, without local rank and epoch.
        batch_size: rows for each rank in each batch.
        device: a device or sharding of JAX; by default the first device.
        options: as of the ``pipe_loader`` of ``ringdance.numpy``: ``table_size``, ``fields``, ``prefetch``,
            ``directory``, ``timeout`` and ``process_set``.
    """
    loader = PipeLoader(channel, batch_size, **options)
    loader.convert = _converter(device)
    return loader
