"""Batches of a table as tensors, and as a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ringdance.data.tables import Table, TableBatch, TableLoader
from ringdance.training.loaders.input_check import watch_training
from ringdance.training.loaders.pipes import PipeLoader
from ringdance.training.loaders.tables import make_table_loader

__all__ = ["pipe_loader", "table_dataset", "table_loader"]


def table_loader(table: Table, batch_size: int, **options: Any) -> TableLoader:
    """Return a loader of this rank's part of each batch, as eager tensors.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.TableBatch``.

    Args:
        table: a ``ringdance.data.Table``.
        batch_size: rows for each rank in each batch.
        options: those of ``ringdance.data.TableLoader``: ``shuffle``, ``seed``, ``threads``, ``prefetch``;
            and ``process_set``.
    """
    loader = make_table_loader(table, batch_size, **options)
    loader.convert = _tensors
    return watch_training(loader)


def pipe_loader(channel: str, batch_size: int, **options: Any) -> PipeLoader:
    """Return a loader of the rows that come from a channel in SageMaker's Pipe mode, as eager tensors.

    A collective call. Each iteration reads the next pipe of the channel, of which each rank of a host has
    one, to its end: see the ``pipe_loader`` of ``ringdance.numpy``.

    Args:
        channel: its name, without local rank and epoch.
        batch_size: rows for each rank in each batch.
        options: as of the ``pipe_loader`` of ``ringdance.numpy``: ``table_size``, ``fields``, ``prefetch``,
            ``directory``, ``timeout`` and ``process_set``.
    """
    loader = PipeLoader(channel, batch_size, **options)
    loader.convert = _tensors
    return loader


def _tensors(batch: TableBatch) -> TableBatch:
    return batch.converted(tf.convert_to_tensor)


def table_dataset(loader: TableLoader) -> Any:
    """Return the batches of a loader as a ``tf.data.Dataset``: each iteration is the rest of its epoch.

    The elements are a mapping with "ids" (n, fields) int64 and "values" (n, fields) float32, labels (n,)
    float32, and weights (n,) float32, all equal to ``TableBatch.weight``: what Keras takes as weights of the
    samples.

    Args:
        loader: of ``table_loader``; call its ``set_epoch`` before each iteration.
    """
    fields = loader.table.fields

    def batches() -> Iterator[Any]:
        for batch in loader.batches():
            yield {"ids": batch.ids, "values": batch.values}, batch.labels, [batch.weight] * len(batch.labels)

    numbers = tf.TensorSpec((None,), tf.float32)
    signature = (
        {"ids": tf.TensorSpec((None, fields), tf.int64), "values": tf.TensorSpec((None, fields), tf.float32)},
        numbers, numbers,
    )  # fmt: skip
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(1)
