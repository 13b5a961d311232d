"""ImageBatches of images as arrays of JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from ringdance.data.loader import Batch, ImageBatches
from ringdance.training.loaders.images import make_loader
from ringdance.training.loaders.input_check import watch_training

__all__ = ["image_loader"]


def image_loader(dataset: Any, batch_size: int, *, device: Any = None, **options: Any) -> ImageBatches:
    """Return a loader of this rank's part of each batch, as arrays of JAX.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.Batch``, with images of shape (n, size, size, 3), uint8. The last batch of an
    epoch may be shorter, and compiles a function once more.

    Args:
        dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: images for each rank in each batch.
        device: a device or sharding of JAX; by default the first device.
        options: those of ``ringdance.data.Loader``: ``image_size``, ``augment``, ``shuffle``, ``seed``,
            ``threads``, ``prefetch``; and ``process_set``.
    """
    loader = make_loader(dataset, batch_size, **options)

    def convert(batch: Batch) -> Batch:
        images, labels = jax.device_put((batch.images, batch.labels.astype("int32")), device)
        return replace(batch, images=images, labels=labels)

    loader.convert = convert
    return watch_training(loader)
