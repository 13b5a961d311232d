"""ImageBatches of images as tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ringdance.data.loader import Batch, ImageBatches, Loader
from ringdance.training.loaders.images import make_loader
from ringdance.training.loaders.input_check import watch_training

__all__ = ["image_loader"]


def image_loader(
    dataset: Any, batch_size: int, *, device: Any = None, **options: Any
) -> ImageBatches:
    """Return a loader of this rank's part of each batch, as tensors.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.Batch``. The images are uint8, of shape (n, 3, size, size), in
    channels-last memory: what was decoded, without a copy.

    Args:
        dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: images for each rank in each batch.
        device: where the tensors are; for a GPU they are decoded into pinned memory and copied without
            blocking.
        options: those of ``ringdance.data.Loader``: ``image_size``, ``augment``, ``shuffle``, ``seed``,
            ``threads``, ``prefetch``; and ``process_set``.
    """
    loader = make_loader(dataset, batch_size, **options)
    target = torch.device("cpu" if device is None else device)
    if target.type == "cuda" and isinstance(loader, Loader):
        loader.memory = lambda shape: torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()

    def convert(batch: Batch) -> Batch:
        held = batch.images.base  # the pinned tensor: its memory is not used again before it is copied
        images = held if isinstance(held, torch.Tensor) else torch.from_numpy(batch.images)
        return replace(
            batch,
            images=images.to(target, non_blocking=True).permute(0, 3, 1, 2),
            labels=torch.from_numpy(batch.labels).to(target, non_blocking=True),
            indices=torch.from_numpy(batch.indices),
        )

    loader.convert = convert
    return watch_training(loader)
