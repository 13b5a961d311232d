"""ImageBatches of images as tensors, and as a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tensorflow as tf

from ringdance.data.loader import Batch, ImageBatches
from ringdance.training.loaders.images import make_loader
from ringdance.training.loaders.input_check import watch_training

__all__ = ["image_dataset", "image_loader"]


def image_loader(dataset: Any, batch_size: int, **options: Any) -> ImageBatches:
    """Return a loader of this rank's part of each batch, as eager tensors.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.Batch``, with images of shape (n, size, size, 3), uint8.

    Args:
        dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: images for each rank in each batch.
        options: those of ``ringdance.data.Loader``: ``image_size``, ``augment``, ``shuffle``, ``seed``,
            ``threads``, ``prefetch``; and ``process_set``.
    """
    loader = make_loader(dataset, batch_size, **options)
    loader.convert = _tensors
    return watch_training(loader)


def _tensors(batch: Batch) -> Batch:
    return replace(
        batch,
        images=tf.convert_to_tensor(batch.images),
        labels=tf.convert_to_tensor(batch.labels),
        indices=tf.convert_to_tensor(batch.indices),
    )


def image_dataset(loader: ImageBatches) -> Any:
    """Return the batches of a loader as a ``tf.data.Dataset``: each iteration is the rest of its epoch.

    The elements are images (n, size, size, 3) uint8, labels (n,) int64, and weights (n,) float32, all equal
    to ``Batch.weight``: what Keras takes as weights of the samples.

    Args:
        loader: of ``image_loader``; call its ``set_epoch`` before each iteration.
    """
    size = loader.image_size

    def batches() -> Iterator[Any]:
        for batch in loader.batches():
            yield batch.images, batch.labels, [batch.weight] * len(batch.labels)

    signature = (
        tf.TensorSpec((None, size, size, 3), tf.uint8), tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.float32),
    )  # fmt: skip
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(1)
