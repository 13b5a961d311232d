"""Loaders of images and of a table's rows, for all bindings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ringdance.data.loader import Batch, ImageBatches, Loader, Synthetic, SyntheticLoader, Transform, piece_of
from ringdance.data.tables import Table, TableLoader
from ringdance.errors import ArgumentError
from ringdance.training.gradients.options import own_cores
from ringdance.training.loaders.input_check import watch_input
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import check_plan


class Loaders:
    """The loaders of a binding, as its methods. They yield NumPy arrays; a binding overrides ``tensor``."""

    def tensor(self, array: Any, device: Any) -> Any:
        """Return an array as a tensor on a device."""
        if device not in (None, "cpu"):
            raise ArgumentError(f"device={device!r}: arrays of NumPy are in the memory of the host only")
        return array

    def images(self, batch: Batch, device: Any) -> Batch:
        """Return a batch of images with tensors."""
        return replace(
            batch, images=self.tensor(batch.images, device), labels=self.tensor(batch.labels, device),
            indices=self.tensor(batch.indices, None),
        )  # fmt: skip

    def memory(self, shape: tuple[int, ...], device: Any) -> np.ndarray[Any, Any]:
        """Return memory for the images of a batch that will be on a device."""
        return np.empty(shape, np.uint8)

    def image_loader(
        self, dataset: Any, batch_size: int, *, image_size: int = 224, augment: bool = True,
        transform: Transform | None = None, shuffle: bool | None = None, seed: int = 0,
        threads: int | None = None, prefetch: int = 2, drop_last: bool = False,
        read_bytes: int | None = None, process_set: ProcessSet = global_process_set, device: Any = None,
    ) -> ImageBatches:
        """Return a loader of this rank's part of each batch of images.

        A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest
        of an epoch as ``ringdance.data.Batch`` of the binding's tensors; TensorFlow's are eager. The images
        are uint8, of shape (n, size, size, 3). Those of PyTorch have shape (n, 3, size, size), in
        channels-last memory: on a CPU what was decoded, without a copy. The last batch of an epoch may be
        shorter; JAX compiles a function once more for it.

        Args:
            dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
            batch_size: images for each rank in each batch.
            image_size: height and width, in pixels.
            augment: a random part of each image, by chance flipped; otherwise the centre.
            transform: what becomes of an image after that: ``transform(image, draw)`` gets an array, uint8,
                of shape (size, size, 3), and returns such; ``draw(low, high)`` returns random numbers, the
                same for a sample of an epoch on any rank. The threads that decode call it.
            shuffle: another order in each epoch; by default as ``augment``.
            seed: of the order and the augmentation.
            threads: that decode; by default one for each core of this rank's share.
            prefetch: batches that are prepared ahead.
            drop_last: leave out the last batch of an epoch where that of all ranks is short.
            read_bytes: what is read of a file at once where the order is shuffled; 0: each image by itself.
                By default 2 MiB for data sets of more than 16 GiB, else 0.
            process_set: the ranks among which samples are divided.
            device: where images and labels are: for PyTorch or TensorFlow a device, for JAX a device or
                sharding. For a GPU, PyTorch decodes into pinned memory and copies without blocking.

        Raises:
            ArgumentError: an argument is wrong.
            MismatchError: the ranks gave different arguments; raised on all.
        """
        shuffle = augment if shuffle is None else shuffle
        same = {
            "the number of samples": len(dataset), "batch_size": batch_size, "image_size": image_size,
            "augment": augment, "transform": transform is not None, "shuffle": shuffle, "seed": seed,
            "drop_last": drop_last, "read_bytes": read_bytes,
            "read_bytes, in samples of the files' mean size,": shuffle and piece_of(dataset, read_bytes),
        }  # fmt: skip
        rank, size = check_plan("pad", same, process_set)
        order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        order |= {"rank": rank, "size": size}
        loader: ImageBatches
        if isinstance(dataset, Synthetic):
            loader = SyntheticLoader(len(dataset), batch_size, image_size, len(dataset.classes), **order)
        else:
            threads = threads or max(1, own_cores())
            loader = Loader(
                dataset, batch_size, image_size=image_size, augment=augment, transform=transform,
                threads=threads, prefetch=prefetch, read_bytes=read_bytes, **order,
            )  # fmt: skip
            loader.memory = lambda shape: self.memory(shape, device)
        loader.convert = lambda batch: self.images(batch, device)
        loader = watch_input(loader) if shuffle else loader  # only that of a training shuffles
        return loader

    def table_loader(
        self, table: Table, batch_size: int, *, shuffle: bool = True, seed: int = 0, threads: int = 1,
        prefetch: int = 2, drop_last: bool = False, process_set: ProcessSet = global_process_set,
        device: Any = None,
    ) -> TableLoader:
        """Return a loader of this rank's part of each batch of rows.

        A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest
        of an epoch as ``ringdance.data.TableBatch`` of the binding's tensors: those of PyTorch on a CPU are
        what was read, without a copy; TensorFlow's are eager; the ids of JAX are int32 unless its 64-bit
        types are enabled. The last batch of an epoch may be shorter; JAX compiles a function once more for
        it.

        Args:
            table: a ``ringdance.data.Table``.
            batch_size: rows for each rank in each batch.
            shuffle: another order of the blocks of 256 rows in each epoch; otherwise that of the files.
            seed: of the order.
            threads: that read and parse.
            prefetch: batches that are prepared ahead.
            drop_last: leave out the last batch of an epoch where that of all ranks is short.
            process_set: the ranks among which rows are divided.
            device: where the tensors are, as of ``image_loader``.

        Raises:
            ArgumentError: an argument is wrong.
            MismatchError: the ranks gave different arguments or tables; raised on all.
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
        loader = watch_input(loader) if shuffle else loader
        return loader


arrays = Loaders()
"""Those that yield NumPy arrays."""
