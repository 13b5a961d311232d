"""Loaders that yield batches of decoded images. Threads prepare the batches in advance.

A global batch is what all ranks together consume in one step: the next ``batch_size * size`` samples in the
epoch's order. It is divided among the ranks into blocks whose sizes differ by at most one sample. After any
batch, the ranks have consumed the first ``position`` samples of the order. The epoch can resume from there
with any number of ranks.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringdance.data.batches import Batches, Epoch, Wait
from ringdance.data.order import BatchPlan, Draws, Indices, check_positive
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores

Array = np.ndarray[Any, Any]
Transform = Callable[[Array, Draws], Array]
_Failure = tuple[int, Exception]
"""The row of a batch that could not be decoded, and its error."""


@dataclass
class Batch:
    """One rank's share of a global batch.

    Attributes:
        images: Shape (n, image_size, image_size, 3), uint8, RGB.
        labels: Shape (n,), int64.
        indices: Shape (n,), int64. The samples' numbers in the data set, or -1 for padding.
        weight: Factor for this rank's mean loss: ``n * size / count`` on ``size`` ranks. With it, the average
            of the losses over all ranks is the mean over all samples in the global batch. 0 on a rank
            without samples, whose batch consists of one padding row.
        position: Number of the epoch's samples that all ranks together have consumed after this batch.
        count: Number of samples in the global batch.
    """

    images: Any
    labels: Any
    indices: Any
    weight: float
    position: int
    count: int


class Source(Protocol):
    """The interface of data sets that a loader can read. ``ringdance.data.Dataset`` implements it."""

    rows: Any

    def __len__(self) -> int: ...
    def read(self, number: int) -> bytes: ...


READ_BYTES, LARGE = 2 << 20, 16 << 30
_READ_AHEAD = 4  # number of batches by which reading is ahead of decoding


def piece_of(dataset: Any, read_bytes: int | None) -> int:
    """Return the number of samples per piece, the same on all ranks, or 0 to read samples separately."""
    if not hasattr(dataset, "will_need") or not len(dataset):
        return 0
    size = max(1, sum(file.size for file in dataset.files))
    if read_bytes is None:
        read_bytes = READ_BYTES if size > LARGE else 0
    samples = min(int(read_bytes * len(dataset) // size), len(dataset))
    return samples if samples > 1 else 0


class ImageBatches(Batches):
    """Base class of the image loaders.

    Attributes:
        image_size: Height and width, in pixels.
    """

    def __init__(self, plan: BatchPlan, image_size: int, threads: int = 1, ahead: int = 1) -> None:
        check_positive(image_size=image_size)
        super().__init__(plan, threads, ahead)
        self.image_size = image_size


class Loader(ImageBatches):
    """Yields batches of decoded images. Each iteration yields the rest of the current epoch.

    Args:
        dataset: A ``ringdance.data.Dataset``, or any object that supports ``len()``, ``read`` and
            ``rows["label"]`` in the same way, and for ``read_bytes`` also ``files`` and ``will_need``.
        batch_size: Images per batch on each rank.
        image_size: Height and width, in pixels.
        augment: If True, crop and flip each image at random. Otherwise, crop it around the center.
        transform: Called as ``transform(image, draw)`` on each image after cropping and flipping, in a
            decoding thread. The image and the returned image have dtype uint8 and shape (image_size,
            image_size, 3). ``draw(low, high)`` returns a random number.
        shuffle: If True, use a different order in each epoch. Defaults to ``augment``.
        seed: Random seed of the order and the augmentation.
        rank: This process's rank. Each rank gets its share of each global batch.
        size: Number of ranks.
        threads: Number of decoding threads. Defaults to one per core of this process.
        prefetch: Number of batches to prepare ahead.
        drop_last: If True, skip an epoch's last global batch if it is short, because a step with few
            samples has a noisy gradient at the full learning rate. Which samples are skipped depends on the
            epoch's order.
        read_bytes: Size of each read in bytes if the order is shuffled. See Note [Order by pieces].
            If 0, each image is read separately, and all orders are equally likely. Defaults to 2 MiB for
            data sets larger than 16 GiB, which may not fit in memory, and to 0 for smaller ones.

    Attributes:
        piece: Number of samples that are read together, or 0 if each sample is read separately.
        memory: Called with the shape of a batch's images. Returns an uninitialized uint8 array.

    The batches do not depend on the number or speed of the threads, because a sample's augmentation is drawn
    from ``seed``, the epoch and the sample's number.

    Raises:
        ArgumentError: An argument is invalid, or an image that an iteration decodes is broken. For a broken
            image, the message names the sample and the file.
    """

    def __init__(
        self, dataset: Source, batch_size: int, *, image_size: int = 224, augment: bool = True,
        transform: Transform | None = None, shuffle: bool | None = None, seed: int = 0, rank: int = 0,
        size: int = 1, threads: int | None = None, prefetch: int = 2, drop_last: bool = False,
        read_bytes: int | None = None,
    ) -> None:
        from ringdance.data import images  # imported here so that a missing Pillow gives a clear error

        threads = usable_cores() if threads is None else threads
        check_positive(threads=threads, prefetch=prefetch)
        if read_bytes is not None and read_bytes < 0:
            raise ArgumentError(f"read_bytes={read_bytes} is negative. Use 0 to read each image separately.")
        self._decode, self.transform, self.augment = images.decode_into, transform, augment
        self.dataset: Any = dataset
        self.piece = piece_of(dataset, read_bytes)
        shuffle = augment if shuffle is None else shuffle
        plan = BatchPlan(
            len(dataset), batch_size, shuffle, seed, rank, size, drop_last=drop_last, piece=self.piece
        )
        super().__init__(plan, image_size, threads, prefetch)
        self.memory: Callable[[tuple[int, ...]], Array] = lambda shape: np.empty(shape, np.uint8)

    thread_name = "ringdance-decode"

    def parts(self, epoch: Epoch) -> Iterator[Any]:
        """Yield the epoch's batches, to be passed to ``prepare``. Starts to read later batches in advance."""
        waiting: deque[Any] = deque()
        requested: set[int] = set()
        for part in epoch.plan.batches():
            if self.piece:
                self._read_ahead(epoch, part[0], requested)
            waiting.append(part)
            if len(waiting) > (_READ_AHEAD if self.piece else 0):
                yield waiting.popleft()
        yield from waiting

    def _read_ahead(self, epoch: Epoch, numbers: Indices, known: set[int]) -> None:
        """Start to read the samples' pieces, except those in ``known``. Adds them to ``known``."""
        if not epoch.plan.shuffle:  # the samples are consecutive
            epoch.reads.submit(self._read_piece, epoch, int(numbers[0]), int(numbers[-1]) + 1)
            return
        for piece in {*(numbers // self.piece).tolist()} - known:
            known.add(piece)
            epoch.reads.submit(self._read_piece, epoch, piece * self.piece, (piece + 1) * self.piece)

    def _read_piece(self, epoch: Epoch, first: int, stop: int) -> None:
        """Read consecutive samples into the page cache. Decoding reports any errors later."""
        # Skip the read if the interpreter is exiting, because it waits for all submitted work.
        if not (epoch.stop.is_set() or getattr(concurrent.futures.thread, "_shutdown", False)):
            self.dataset.will_need(first, stop)

    def prepare(self, epoch: Epoch, part: Any) -> Wait:
        """Submit the images of a batch to the threads."""
        batch, tasks, count = self.empty(*part), [], min(self.threads, len(part[0]))
        for first in range(count):
            rows = range(first, len(part[0]), count)
            tasks.append(
                epoch.pool.submit(self._fill, batch.images, part[0], rows, epoch.plan.epoch, epoch.stop)
            )

        def wait() -> list[Batch]:
            failures = [failure for task in tasks if (failure := task.result())]
            if failures and not epoch.stop.is_set():
                raise min(failures, key=lambda failure: failure[0])[1]
            return [batch]

        return wait

    def _fill(
        self, images: Array, numbers: Indices, rows: range, epoch: int, stop: threading.Event
    ) -> _Failure | None:
        """Decode some rows of a batch. If a row fails, returns its number and the error."""
        for row in rows:
            if stop.is_set():
                break
            try:
                self.load(images[row], int(numbers[row]), epoch)
            except Exception as error:
                return row, error
        return None

    def empty(self, numbers: Indices, weight: float, position: int, count: int) -> Batch:
        """Return a batch whose images are allocated but not yet decoded."""
        images = self.memory((len(numbers), self.image_size, self.image_size, 3))
        return _batch(images, self.dataset.rows["label"][numbers], numbers, weight, position, count)

    def load(self, out: Array, number: int, epoch: int) -> None:
        """Decode one sample into ``out``, shape (image_size, image_size, 3), augmented for that epoch."""
        draw = Draws(self.plan.seed, epoch, number)
        try:
            self._decode(out, self.dataset.read(number), draw if self.augment else None)
        except ArgumentError as error:
            sample = f"{self.plan.where}sample {number}{_place(self.dataset, number)}"
            raise ArgumentError(f"{sample}: {error}") from None
        if self.transform:
            result = self.transform(out, draw)
            if (result.shape, result.dtype) != (out.shape, out.dtype):
                raise ArgumentError(
                    f"transform returned {result.dtype} {result.shape}. It must return uint8 {out.shape}."
                )
            out[:] = result


@dataclass(frozen=True)
class Synthetic:
    """A stand-in for a data set, to measure training speed. See ``SyntheticLoader``.

    Attributes:
        samples: Samples per epoch.
        classes: Class labels. Only their number is used.
    """

    samples: int = 1_281_167
    classes: Any = range(1000)

    def __len__(self) -> int:
        return self.samples


class SyntheticLoader(ImageBatches):
    """Like ``Loader``, but without a data set. Use it to try out or time a training script.

    All batches share one array of random pixels. The sample numbers, weights and positions are the
    same as for a data set with ``samples`` images.

    Args:
        samples: Samples per epoch.
        batch_size: Images per batch on each rank.
        image_size: Height and width, in pixels.
        classes: Number of labels. A sample's label is its number modulo ``classes``.
        shuffle, seed, rank, size, drop_last: Same meaning as in ``Loader``.
    """

    def __init__(
        self, samples: int, batch_size: int, image_size: int = 224, classes: int = 1000, *,
        shuffle: bool = True, seed: int = 0, rank: int = 0, size: int = 1, drop_last: bool = False,
    ) -> None:
        check_positive(classes=classes)
        plan = BatchPlan(samples, batch_size, shuffle, seed, rank, size, drop_last=drop_last)
        super().__init__(plan, image_size)
        self.classes = classes
        shape = (batch_size, image_size, image_size, 3)
        self._images = np.random.RandomState([seed, rank]).randint(0, 256, shape, dtype=np.uint8)

    def batches(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch as NumPy arrays."""
        for part in self.plan.batches():
            numbers = part[0]
            yield _batch(self._images[: len(numbers)], numbers % self.classes, *part)


def _batch(images: Array, labels: Array, numbers: Indices, weight: float, position: int, count: int) -> Batch:
    indices = numbers if weight else np.full_like(numbers, -1)
    return Batch(images, labels.astype(np.int64), indices, weight, position, count)


def _place(dataset: Any, number: int) -> str:
    if not hasattr(dataset, "files"):
        return ""
    row = dataset.rows[number]
    name = dataset.path / dataset.files[int(row["file"])].name
    return f" of {dataset.split} ({row['length']} bytes from {row['offset']} of {name})"
