"""Loaders for images and table rows, for all bindings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ringdance.data.loader import Batch, ImageBatches, Loader, Synthetic, SyntheticLoader, Transform, piece_of
from ringdance.data.tables import Table, TableLoader
from ringdance.errors import ArgumentError
from ringdance.training.gradients.cores import own_cores
from ringdance.training.loaders.input_check import watch_input
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import check_plan


class Loaders:
    """A binding's loader functions, as methods. They yield NumPy arrays unless ``tensor`` is overridden."""

    def tensor(self, array: Any, device: Any) -> Any:
        """Return an array as a tensor on a device."""
        if device not in (None, "cpu"):
            raise ArgumentError(f"device={device!r} cannot be used, because NumPy arrays are in host memory.")
        return array

    def images(self, batch: Batch, device: Any) -> Batch:
        """Return a batch of images with its arrays converted to tensors."""
        return replace(
            batch, images=self.tensor(batch.images, device), labels=self.tensor(batch.labels, device),
            indices=self.tensor(batch.indices, None),
        )  # fmt: skip

    def memory(self, shape: tuple[int, ...], device: Any) -> np.ndarray[Any, Any]:
        """Allocate memory for a batch of images that is then moved to a device."""
        return np.empty(shape, np.uint8)

    def image_loader(
        self, dataset: Any, batch_size: int, *, image_size: int = 224, augment: bool = True,
        transform: Transform | None = None, shuffle: bool | None = None, seed: int = 0,
        threads: int | None = None, prefetch: int = 2, drop_last: bool = False,
        read_bytes: int | None = None, process_set: ProcessSet = global_process_set, device: Any = None,
    ) -> ImageBatches:
        """Return a loader for this rank's part of each batch of images.

        A collective call: all ranks must make it, and it compares their arguments. Each iteration yields the
        rest of an epoch as ``ringdance.data.Batch`` objects with the binding's tensors (eager ones in
        TensorFlow). The images are uint8, of shape (n, size, size, 3). PyTorch images have shape
        (n, 3, size, size), in channels-last memory; on a CPU they share the decoded data, without a copy.
        The last batch of an epoch may be shorter, in which case JAX compiles the functions that use it again.

        Args:
            dataset: A ``ringdance.data.Dataset`` or ``Synthetic``.
            batch_size: Number of images per batch on each rank.
            image_size: Height and width in pixels.
            augment: If True, crop and flip images at random. Otherwise, crop the center.
            transform: Called for each cropped image as ``transform(image, draw)``, on decoding threads.
                It takes and returns a uint8 array of shape (size, size, 3). ``draw(low, high)`` returns
                random numbers, which do not depend on the rank that a sample is on.
            shuffle: If True, each epoch has a different order. Defaults to ``augment``.
            seed: Seed for the order and the augmentation.
            threads: Number of decoding threads. By default, one per core in this rank's share.
            prefetch: Number of batches to prepare ahead.
            drop_last: If True, skip the last global batch of an epoch if it is short.
            read_bytes: Number of bytes to read from a file at a time if ``shuffle`` is set. 0 reads each
                image separately. By default, 2 MiB for data sets of more than 16 GiB, otherwise 0.
            process_set: Ranks among which the samples are divided.
            device: Device of images and labels (in JAX, also a sharding). For a GPU, the PyTorch
                binding decodes into pinned memory and copies without blocking.

        Raises:
            ArgumentError: An argument is wrong.
            MismatchError: The ranks passed different arguments. Raised on all ranks.
        """
        shuffle = augment if shuffle is None else shuffle
        same = {
            "the number of samples": len(dataset), "batch_size": batch_size, "image_size": image_size,
            "augment": augment, "transform": transform is not None, "shuffle": shuffle, "seed": seed,
            "drop_last": drop_last, "read_bytes": read_bytes,
            "read_bytes, in samples of the files' mean size,": shuffle and piece_of(dataset, read_bytes),
        }  # fmt: skip
        rank, size = check_plan("pad", same, process_set)
        order = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "rank": rank, "size": size}
        decoding = {"augment": augment, "transform": transform, "threads": threads or max(1, own_cores())}
        reading = {"prefetch": prefetch, "read_bytes": read_bytes}
        loader = self._image_batches(dataset, batch_size, image_size, order, decoding | reading, device)
        return watch_input(loader) if shuffle else loader  # Only loaders for training shuffle.

    def _image_batches(
        self, dataset: Any, batch_size: int, image_size: int, order: Any, decoding: Any, device: Any
    ) -> ImageBatches:
        """Create a loader that converts its batches. ``decoding``: options that apply only to real images."""
        loader: ImageBatches
        if isinstance(dataset, Synthetic):
            loader = SyntheticLoader(len(dataset), batch_size, image_size, len(dataset.classes), **order)
        else:
            loader = Loader(dataset, batch_size, image_size=image_size, **order, **decoding)
            loader.memory = lambda shape: self.memory(shape, device)
        loader.convert = lambda batch: self.images(batch, device)
        return loader

    def table_loader(
        self, table: Table, batch_size: int, *, shuffle: bool = True, seed: int = 0, threads: int = 1,
        prefetch: int = 2, drop_last: bool = False, process_set: ProcessSet = global_process_set,
        device: Any = None,
    ) -> TableLoader:
        """Return a loader for this rank's part of each batch of rows.

        A collective call: all ranks must make it, and it compares their arguments. Each iteration yields the
        rest of an epoch as ``ringdance.data.TableBatch`` objects with the binding's tensors. PyTorch tensors
        on a CPU share the data that were read, without a copy. TensorFlow tensors are eager. In JAX, ids are
        int32 unless 64-bit types are enabled. The last batch of an epoch may be shorter, in which case JAX
        compiles the functions that use it again.

        Args:
            table: A ``ringdance.data.Table``.
            batch_size: Number of rows per batch on each rank.
            shuffle: If True, each epoch has a different order of blocks of 256 rows. Otherwise, file order.
            seed: Seed for the order.
            threads: Number of threads that read and parse rows.
            prefetch: Number of batches to prepare ahead.
            drop_last: If True, skip the last global batch of an epoch if it is short.
            process_set: Ranks among which the rows are divided.
            device: Device of the tensors, as in ``image_loader``.

        Raises:
            ArgumentError: An argument is wrong.
            MismatchError: The ranks passed different arguments or tables. Raised on all ranks.
        """
        same = {
            "the number of rows": len(table), "the number of fields": table.fields,
            "the table's size": table.table_size, "batch_size": batch_size, "shuffle": shuffle, "seed": seed,
            "drop_last": drop_last,
        }  # fmt: skip
        rank, size = check_plan("pad", same, process_set)
        loader = TableLoader(
            table, batch_size, shuffle=shuffle, seed=seed, rank=rank, size=size, threads=threads,
            prefetch=prefetch, drop_last=drop_last,
        )  # fmt: skip
        loader.convert = lambda batch: batch.converted(lambda array: self.tensor(array, device))
        return watch_input(loader) if shuffle else loader


arrays = Loaders()
"""Loaders that yield NumPy arrays."""
