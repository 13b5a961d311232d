"""Batches of decoded images in the order of an epoch, by threads, ahead of the training.

A global batch is what all ranks together take in one step: the next ``batch_size * size`` samples of the
epoch's order. It is divided among the ranks into blocks that differ by at most one sample. After any batch an
epoch has consumed the first ``position`` samples of its order, and can go on there with any number of ranks.
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
from ringdance.data.order import Draws, Indices, Plan, check_positive
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores

Array = np.ndarray[Any, Any]
Transform = Callable[[Array, Draws], Array]
_Failure = tuple[int, Exception]
"""The row of a batch that could not be decoded, and why."""


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


READ_BYTES, LARGE = 2 << 20, 16 << 30
_READ_AHEAD = 4  # batches between reading a piece and decoding its first image


def piece_of(dataset: Any, read_bytes: int | None) -> int:
    """Return how many samples are read at once; 0: each by itself. Ranks must have the same."""
    if not hasattr(dataset, "will_need") or not len(dataset):
        return 0
    size = max(1, sum(file.size for file in dataset.files))
    if read_bytes is None:
        read_bytes = READ_BYTES if size > LARGE else 0
    found = min(int(read_bytes * len(dataset) // size), len(dataset))
    return found if found > 1 else 0


class ImageBatches(Batches):
    """What loaders of images share.

    Attributes:
        image_size: height and width, in pixels.
    """

    def __init__(self, plan: Plan, image_size: int, threads: int = 1, ahead: int = 1) -> None:
        check_positive(image_size=image_size)
        super().__init__(plan, threads, ahead)
        self.image_size = image_size


class Loader(ImageBatches):
    """Decoded batches of a data set, the rest of an epoch at each iteration.

    Args:
        dataset: a ``ringdance.data.Dataset``, or anything with its ``len``, ``read`` and ``rows["label"]``,
            and for `read_bytes` its ``files`` and ``will_need``.
        batch_size: images for this rank in each batch.
        image_size: height and width, in pixels.
        augment: a random part of each image, by chance flipped; otherwise the centre.
        transform: what becomes of an image after that: ``transform(image, draw)`` gets uint8 of shape
            (image_size, image_size, 3) and returns such; ``draw(low, high)`` returns random numbers. The
            threads that decode call it.
        shuffle: another order in each epoch; by default as ``augment``.
        seed: of the order and the augmentation.
        rank, size: of the job; every rank gets its part of each global batch.
        threads: that decode; by default one for each core of this process.
        prefetch: batches that are prepared ahead.
        drop_last: leave out the last global batch of an epoch where it is short: a step with few samples
            has a noisy gradient at the full rate. Which samples these are changes with the order.
        read_bytes: what is read of a file at once where the order is shuffled: see Note [Order by pieces]. 0:
            each image by itself, in an order of which all are equally likely. By default 2 MiB for data sets
            of more than 16 GiB, which memory may not hold, and 0 for others.

    Attributes:
        piece: samples that are read at once; 0: each by itself.
        memory: makes the array of a batch's images, given its shape.

    What it yields depends on the arguments alone, not on threads or their speed: a sample's augmentation is
    drawn from ``seed``, the epoch and the number of the sample.

    Raises:
        ArgumentError: an argument is wrong, or an image is broken: with its number and file, when iterating.
    """

    def __init__(
        self, dataset: Source, batch_size: int, *, image_size: int = 224, augment: bool = True,
        transform: Transform | None = None, shuffle: bool | None = None, seed: int = 0, rank: int = 0,
        size: int = 1, threads: int | None = None, prefetch: int = 2, drop_last: bool = False,
        read_bytes: int | None = None,
    ) -> None:
        from ringdance.data import images  # here: a clear error where Pillow is missing

        threads = usable_cores() if threads is None else threads
        check_positive(threads=threads, prefetch=prefetch)
        if read_bytes is not None and read_bytes < 0:
            raise ArgumentError(f"read_bytes={read_bytes}: give a number of bytes, 0 to read each by itself.")
        self._decode, self.transform = images.decode_into, transform
        self.dataset, self.augment, self.piece = dataset, augment, piece_of(dataset, read_bytes)
        self._will_need: Any = getattr(dataset, "will_need", None)
        shuffle = augment if shuffle is None else shuffle
        plan = Plan(
            len(dataset), batch_size, shuffle, seed, rank, size, drop_last=drop_last, piece=self.piece
        )
        super().__init__(plan, image_size, threads, prefetch)
        self.memory: Callable[[tuple[int, ...]], Array] = lambda shape: np.empty(shape, np.uint8)

    thread_name = "ringdance-decode"

    def parts(self, epoch: Epoch) -> Iterator[Any]:
        """Yield the batches of an epoch, some time after threads have begun to read their pieces."""
        waiting: deque[Any] = deque()
        known: set[int] = set()
        for part in epoch.plan.batches():
            if self.piece:
                self._read_ahead(epoch, part[0], known)
            waiting.append(part)
            if len(waiting) > (_READ_AHEAD if self.piece else 0):
                yield waiting.popleft()
        yield from waiting

    def _read_ahead(self, epoch: Epoch, numbers: Indices, known: set[int]) -> None:
        """Have the pieces of some samples read that are not in `known`, and add them."""
        if not epoch.plan.shuffle:  # they are next to one another
            epoch.reads.submit(self._read_piece, epoch, int(numbers[0]), int(numbers[-1]) + 1)
            return
        for piece in {*(numbers // self.piece).tolist()} - known:
            known.add(piece)
            epoch.reads.submit(self._read_piece, epoch, piece * self.piece, (piece + 1) * self.piece)

    def _read_piece(self, epoch: Epoch, first: int, stop: int) -> None:
        """Read some samples, whose errors are those of decoding them."""
        # At its end the interpreter waits for all that was submitted, though it will not be used.
        if not (epoch.stop.is_set() or getattr(concurrent.futures.thread, "_shutdown", False)):
            self._will_need(first, stop)

    def prepare(self, epoch: Epoch, part: Any) -> Wait:
        """Give the threads the images of a batch."""
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
        """Decode some rows of a batch; return the first that fails, with its error."""
        for row in rows:
            if stop.is_set():
                break
            try:
                self.load(images[row], int(numbers[row]), epoch)
            except Exception as error:
                return row, error
        return None

    def empty(self, numbers: Indices, weight: float, position: int, count: int) -> Batch:
        """Return a batch without its images: memory for them."""
        images = self.memory((len(numbers), self.image_size, self.image_size, 3))
        return _batch(images, self.dataset.rows["label"][numbers], numbers, weight, position, count)

    def load(self, out: Array, number: int, epoch: int) -> None:
        """Decode one sample into ``out``, shape (image_size, image_size, 3), as in that epoch."""
        draw = Draws(self.plan.seed, epoch, number)
        try:
            self._decode(out, self.dataset.read(number), draw if self.augment else None)
        except ArgumentError as error:
            where = f"{self.plan.where}sample {number}{_place(self.dataset, number)}"
            raise ArgumentError(f"{where}: {error}") from None
        if self.transform:
            found = self.transform(out, draw)
            if (found.shape, found.dtype) != (out.shape, out.dtype):
                raise ArgumentError(
                    f"transform returned {found.dtype} of shape {found.shape}, not uint8 of shape {out.shape}"
                )
            out[:] = found


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
        shuffle, seed, rank, size, drop_last: as of ``Loader``.
    """

    def __init__(
        self, samples: int, batch_size: int, image_size: int = 224, classes: int = 1000, *,
        shuffle: bool = True, seed: int = 0, rank: int = 0, size: int = 1, drop_last: bool = False,
    ) -> None:
        check_positive(classes=classes)
        plan = Plan(samples, batch_size, shuffle, seed, rank, size, drop_last=drop_last)
        super().__init__(plan, image_size)
        self.classes = classes
        shape = (batch_size, image_size, image_size, 3)
        self._images = np.random.RandomState([seed, rank]).randint(0, 256, shape, dtype=np.uint8)

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
