"""A loader of images for the ranks of a job."""

from __future__ import annotations

from typing import Any

from ringdance.data.loader import ImageBatches, Loader, Synthetic, SyntheticLoader
from ringdance.training import basics
from ringdance.training.gradients.options import own_cores
from ringdance.training.loaders.input_check import watch_training
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import check_plan

__all__ = ["image_loader"]


def image_loader(dataset: Any, batch_size: int, **options: Any) -> ImageBatches:
    """Return a loader of this rank's part of each batch, as NumPy arrays.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.Batch``.

    Args:
        dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: images for each rank in each batch.
        options: those of ``ringdance.data.Loader``: ``image_size``, ``augment``, ``shuffle``, ``seed``,
            ``threads``, ``prefetch``; and ``process_set``.
    """
    return watch_training(make_loader(dataset, batch_size, **options))


def make_loader(
    dataset: Any, batch_size: int, *, image_size: int = 224, augment: bool = True,
    shuffle: bool | None = None, seed: int = 0, threads: int | None = None, prefetch: int = 2,
    process_set: ProcessSet = global_process_set,
) -> ImageBatches:
    """Return the loader that the bindings adapt and watch. A collective call of all ranks of the set.

    Args:
        dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: images for each rank in each batch.
        image_size: height and width, in pixels.
        augment: a random part of each image, by chance flipped; otherwise the centre.
        shuffle: another order in each epoch; by default as ``augment``.
        seed: of the order and the augmentation.
        threads: that decode; by default one for each core of this rank's share.
        prefetch: batches that are prepared ahead.
        process_set: the ranks among which samples are divided.

    Raises:
        ArgumentError: an argument is wrong.
        MismatchError: the ranks gave different arguments; raised on all.
    """
    shuffle = augment if shuffle is None else shuffle
    same = {
        "the number of samples": len(dataset), "batch_size": batch_size, "image_size": image_size,
        "augment": augment, "shuffle": shuffle, "seed": seed,
    }  # fmt: skip
    rank, size = check_plan("pad", same, process_set)
    if isinstance(dataset, Synthetic):
        return SyntheticLoader(
            len(dataset), batch_size, image_size, len(dataset.classes), shuffle=shuffle, seed=seed, rank=rank,
            size=size,
        )
    return Loader(
        dataset, batch_size, image_size=image_size, augment=augment, shuffle=shuffle, seed=seed, rank=rank,
        size=size, threads=threads or max(1, own_cores(basics.local_size())), prefetch=prefetch,
    )
