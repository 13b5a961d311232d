"""Batches of decoded images in the order of an epoch, by threads, ahead of the training.

A global batch is what all ranks together take in one step: the next ``batch_size * size`` samples of the
epoch's order. It is divided among the ranks into blocks that differ by at most one sample. After any batch an
epoch has consumed the first ``position`` samples of its order, and can go on there with any number of ranks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringdance.data.batches import Batches
from ringdance.data.order import Draws, Indices, Plan, check_positive
from ringdance.errors import ArgumentError

Array = np.ndarray[Any, Any]


@dataclass
class Batch:
    """One rank's part of a global batch.

    Attributes:
        images: shape (n, size, size, 3), uint8, RGB.
        labels: shape (n,), int64.
        indices: shape (n,), int64: the numbers of the samples in the data set; -1 for padding.
        weight: factor for this rank's mean loss, so that the average over ranks is the mean over the samples
            of the global batch: ``n * size / count``. 0 for a rank that got none: it has one row of padding.
        position: samples of the epoch that all ranks have consumed after this batch.
        count: samples of the global batch.
    """

    images: Any
    labels: Any
    indices: Any
    weight: float
    position: int
    count: int


class Source(Protocol):
    """What a loader reads: see ``ringdance.data.Dataset``."""

    rows: Any

    def __len__(self) -> int: ...
    def read(self, number: int) -> bytes: ...


class ImageBatches(Batches):
    """What loaders of images share.

    Attributes:
        image_size: height and width, in pixels.
    """

    def __init__(self, plan: Plan, image_size: int) -> None:
        check_positive(image_size=image_size)
        super().__init__(plan)
        self.image_size = image_size


class Loader(ImageBatches):
    """Decoded batches of a data set, the rest of an epoch at each iteration.

    Args:
        dataset: a ``ringdance.data.Dataset``, or anything with its ``len``, ``read`` and ``rows["label"]``.
        batch_size: images for this rank in each batch.
        image_size: height and width, in pixels.
        augment: a random part of each image, by chance flipped; otherwise the centre.
        shuffle: another order in each epoch; by default as ``augment``.
        seed: of the order and the augmentation.
        rank, size: of the job; every rank gets its part of each global batch.
        threads: that decode; by default one for each core of this process.
        prefetch: batches that are prepared ahead.

    Attributes:
        memory: makes the array of a batch's images, given its shape.

    What it yields depends on the arguments alone, not on threads or their speed: a sample's augmentation is
    drawn from ``seed``, the epoch and the number of the sample.

    Raises:
        ArgumentError: an argument is wrong, or an image is broken: with its number and file, when iterating.
    """

    def __init__(
        self, dataset: Source, batch_size: int, *, image_size: int = 224, augment: bool = True,
        shuffle: bool | None = None, seed: int = 0, rank: int = 0, size: int = 1, threads: int | None = None,
        prefetch: int = 2,
    ) -> None:
        from ringdance.data import images  # here: a clear error where Pillow is missing

        threads = _usable_cores() if threads is None else threads
        check_positive(threads=threads, prefetch=prefetch)
        self._decode = images.decode_into
        self.dataset, self.augment = dataset, augment
        self.threads, self.prefetch = threads, prefetch
        shuffle = augment if shuffle is None else shuffle
        super().__init__(Plan(len(dataset), batch_size, shuffle, seed, rank, size), image_size)
        self.memory: Callable[[tuple[int, ...]], Array] = lambda shape: np.empty(shape, np.uint8)
        self._runs: weakref.WeakSet[_Run] = weakref.WeakSet()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the rest of the epoch as NumPy arrays."""
        run = _Run(self)
        self._runs.add(run)
        try:
            yield from run.batches()
        finally:
            run.close()

    def close(self) -> None:
        """End the threads of iterations that are still under way."""
        for run in list(self._runs):
            run.close()

    def empty(self, numbers: Indices, weight: float, position: int, count: int) -> Batch:
        """Return a batch without its images: memory for them."""
        images = self.memory((len(numbers), self.image_size, self.image_size, 3))
        return _batch(images, self.dataset.rows["label"][numbers], numbers, weight, position, count)

    def load(self, out: Array, number: int, epoch: int) -> None:
        """Decode one sample into ``out``, shape (image_size, image_size, 3), as in that epoch."""
        draw = Draws(self.plan.seed, epoch, number) if self.augment else None
        try:
            self._decode(out, self.dataset.read(number), draw)
        except ArgumentError as error:
            where = f"rank {self.plan.rank}: sample {number}{_place(self.dataset, number)}"
            raise ArgumentError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Synthetic:
    """Stands for a data set where only the speed of a training counts: see ``SyntheticLoader``.

    Attributes:
        samples: of an epoch.
        classes: the labels.
    """

    samples: int = 1_281_167
    classes: Any = range(1000)

    def __len__(self) -> int:
        return self.samples


class SyntheticLoader(ImageBatches):
    """Batches with the interface of ``Loader`` and no data set: to try a training and its speed.

    The images are one batch of random pixels, the same memory each time; samples, weights and positions are
    those of a data set with as many samples.

    Args:
        samples: of an epoch.
        batch_size: images for this rank in each batch.
        image_size: height and width, in pixels.
        classes: number of labels; a sample's label is its number modulo this.
        shuffle, seed, rank, size: as of ``Loader``.
    """

    def __init__(
        self, samples: int, batch_size: int, image_size: int = 224, classes: int = 1000, *,
        shuffle: bool = True, seed: int = 0, rank: int = 0, size: int = 1,
    ) -> None:
        check_positive(classes=classes)
        super().__init__(Plan(samples, batch_size, shuffle, seed, rank, size), image_size)
        self.classes = classes
        shape = (batch_size, image_size, image_size, 3)
        self._images = np.random.RandomState([seed, rank]).randint(0, 256, shape, np.uint8)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the rest of the epoch as NumPy arrays."""
        for part in self.plan.batches():
            numbers = part[0]
            yield _batch(self._images[: len(numbers)], numbers % self.classes, *part)


def _batch(
    images: Array, labels: Array, numbers: Indices, weight: float, position: int, count: int
) -> Batch:
    indices = numbers if weight else np.full_like(numbers, -1)
    return Batch(images, labels.astype(np.int64), indices, weight, position, count)


def _place(dataset: Any, number: int) -> str:
    if not hasattr(dataset, "files"):
        return ""
    row = dataset.rows[number]
    name = dataset.path / dataset.files[int(row["file"])].name
    return f" of {dataset.split} ({row['length']} bytes from {row['offset']} of {name})"


class _Pending:
    """A batch that threads fill, row by row."""

    def __init__(self, batch: Batch, numbers: Indices) -> None:
        self.batch = batch
        self.images, self.numbers = batch.images, numbers
        self.taken = 0
        self.left = len(numbers)
        self.failed: dict[int, BaseException] = {}


class _Run:
    """The threads of one iteration. Each takes the next row, of batches up to ``prefetch`` ahead."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._epoch = loader, loader.plan.epoch
        self._parts = loader.plan.batches()
        self._ahead: deque[_Pending] = deque()  # in order: not yet yielded, the last one with rows to take
        self._ended = self._closed = False
        self._failed: BaseException | None = None
        self._changed = threading.Condition()  # guards all of it
        self._threads = [
            threading.Thread(target=self._work, name=f"ringdance-decode-{number}", daemon=True)
            for number in range(loader.threads)
        ]

    def batches(self) -> Iterator[Batch]:
        """Yield the batches in order."""
        for thread in self._threads:
            thread.start()
        while (pending := self._first()) is not None:
            if pending.failed:
                raise pending.failed[min(pending.failed)]
            batch = pending.batch
            del pending  # the memory is the caller's alone
            yield batch
            del batch

    def _first(self) -> _Pending | None:
        """Wait for the next batch; None at the end."""
        with self._changed:
            self._changed.wait_for(self._ready)
            if self._failed is not None:
                raise self._failed
            if self._closed or not self._ahead:
                return None
            self._changed.notify_all()
            return self._ahead.popleft()

    def _ready(self) -> bool:
        stopped = self._closed or self._failed is not None
        return stopped or (not self._ahead[0].left if self._ahead else self._ended)

    def close(self) -> None:
        """End the threads; each finishes the image it is at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._ahead.clear()

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                self._fill(*taken)
                del taken
        except BaseException as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _fill(self, pending: _Pending, row: int) -> None:
        failed = None
        try:
            self._loader.load(pending.images[row], int(pending.numbers[row]), self._epoch)
        except Exception as error:
            failed = error
        with self._changed:
            if failed is not None:
                pending.failed[row] = failed
            pending.left -= 1
            if not pending.left:
                self._changed.notify_all()

    def _take(self) -> tuple[_Pending, int] | None:
        """Return the next batch and row to fill, as soon as it may be begun; None at the end."""
        with self._changed:
            while not (self._closed or self._ended):
                last = self._ahead[-1] if self._ahead else None
                if last is not None and last.taken < len(last.numbers):
                    last.taken += 1
                    return last, last.taken - 1
                if len(self._ahead) < self._loader.prefetch:
                    part = next(self._parts, None)
                    if part is None:
                        self._ended = True
                        self._changed.notify_all()
                    else:
                        self._ahead.append(_Pending(self._loader.empty(*part), part[0]))
                else:
                    self._changed.wait()
        return None


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
