"""Loaders that yield eager tensors, and functions that convert such loaders to a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from ringdance.data.loader import ImageBatches
from ringdance.data.tables import TableLoader
from ringdance.training.loaders.binding import Loaders

__all__ = ["image_dataset", "image_loader", "table_dataset", "table_loader"]


class _Loaders(Loaders):
    def tensor(self, array: Any, device: Any) -> Any:
        with nullcontext() if device is None else tf.device(device):
            return tf.convert_to_tensor(array)


_own = _Loaders()
image_loader, table_loader = _own.image_loader, _own.table_loader


def image_dataset(loader: ImageBatches) -> Any:
    """Return a loader's batches as a ``tf.data.Dataset``. Each iteration yields the rest of the epoch.

    Each element consists of images (n, size, size, 3) as uint8, labels (n,) as int64, and weights (n,) as
    float32. All weights in a batch are equal to ``Batch.weight``. Keras uses them as sample weights.

    Args:
        loader: A loader from ``image_loader``. Call its ``set_epoch`` before each iteration.
    """
    images = tf.TensorSpec((None, loader.image_size, loader.image_size, 3), tf.uint8)
    return _dataset(loader, lambda batch: batch.images, images, tf.int64)


def table_dataset(loader: TableLoader) -> Any:
    """Return a loader's batches as a ``tf.data.Dataset``. Each iteration yields the rest of the epoch.

    Each element consists of a mapping with "ids" (n, fields) as int64 and "values" (n, fields) as float32,
    labels (n,) as float32, and weights (n,) as float32. All weights in a batch are equal to
    ``TableBatch.weight``. Keras uses them as sample weights.

    Args:
        loader: A loader from ``table_loader``. Call its ``set_epoch`` before each iteration.
    """
    shape = None, loader.table.fields
    inputs = {"ids": tf.TensorSpec(shape, tf.int64), "values": tf.TensorSpec(shape, tf.float32)}
    return _dataset(loader, lambda batch: {"ids": batch.ids, "values": batch.values}, inputs, tf.float32)


def _dataset(loader: Any, inputs: Callable[[Any], Any], spec: Any, labels: Any) -> Any:
    def batches() -> Iterator[Any]:
        for batch in loader.batches():
            yield inputs(batch), batch.labels, [batch.weight] * len(batch.labels)

    signature = spec, tf.TensorSpec((None,), labels), tf.TensorSpec((None,), tf.float32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(1)
