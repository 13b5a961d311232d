"""What the recipes' tables have in common: time and money so far, the wait for input, TensorBoard's files."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ringdance.numpy as hvd
from ringdance.data import Batch


class TrainingLog:
    """What rank 0 prints of a training.

    Args:
        given: options of the recipe: ``price_per_hour`` and ``tensorboard``.
        seconds: of the runs before.

    Attributes:
        samples: of all ranks since :meth:`clear`.
        waited: seconds since then in which the training waited for them.
    """

    def __init__(self, given: argparse.Namespace, seconds: float) -> None:
        self.began, self.price = time.perf_counter() - seconds, given.price_per_hour
        self.board: Any = None
        if hvd.rank() == 0 and given.tensorboard:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(given.tensorboard)
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.mark, self.samples, self.waited = time.perf_counter(), 0, 0.0

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if hvd.rank() == 0:
            print(text, flush=True)

    def seconds(self) -> float:
        """Return the time so far, with that of the runs before."""
        return time.perf_counter() - self.began

    def timed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and add up how long the training waits for them."""
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            self.samples += batch.count
            yield batch

    def rates(self) -> tuple[float, float]:
        """Return samples per second since :meth:`clear`, and the share of the time that was waiting."""
        passed = time.perf_counter() - self.mark
        return self.samples / passed, self.waited / passed

    def cost(self) -> str:
        """Return the cost so far."""
        return f"{self.price * self.seconds() / 3600:.2f}" if self.price is not None else "-"

    def scalars(self, step: int, **values: float) -> None:
        """Write values for TensorBoard, and begin to count."""
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        self.clear()

    def close(self) -> None:
        """Print the time and the cost of all; complete TensorBoard's files."""
        cost = f", cost {self.cost()}" if self.price is not None else ""
        self.print(f"done in {clock(self.seconds())}{cost}")
        if self.board is not None:
            self.board.close()


TRAINED_ON = "train (the data has no other split: these are not validation figures)"
"""What an evaluation is of where there is nothing but what is trained on."""


class ImageLog(TrainingLog):
    """The table of a training with images, and the files that say which images were used.

    Args:
        given: options of the recipe, with ``sample_log``.
        images: of an epoch.
        epochs: of the schedule.
        seconds: of the runs before.
    """

    def __init__(self, given: argparse.Namespace, images: int, epochs: float, seconds: float) -> None:
        super().__init__(given, seconds)
        self.epoch, self.total = images, images * epochs
        self.used = Path(given.sample_log) / f"rank-{hvd.rank()}.jsonl" if given.sample_log else None

    def begin(self, step: int, epoch: int, done: int) -> None:
        """Print where the training goes on, and the head of the table."""
        if step:
            self.print(f"going on after step {step}: epoch {epoch}, {done} of its images are done")
        self.print(
            f"{'epoch':>8} {'step':>8} {'rate':>9} {'loss':>8} {'images/s':>9} {'per rank':>9} {'input':>6} "
            f"{'time':>9} {'left':>9}{'cost':>10}"
        )

    def use(self, step: int, epoch: int, batch: Batch) -> None:
        """Note which images this rank has used in a step."""
        if self.used:
            samples = batch.indices[batch.indices >= 0].tolist()
            with self.used.open("a") as file:
                print(json.dumps({"step": step, "epoch": epoch, "samples": samples}), file=file)

    def line(self, step: int, done: int, rate: float, loss: float) -> None:
        """Print a line on the steps since the last one; ``done``: images of all epochs. Collective."""
        mean = float(hvd.allreduce(np.float32(loss), name="loss"))
        speed, waiting = self.rates()
        left = clock((self.total - done) / speed)
        self.print(
            f"{done / self.epoch:8.2f} {step:8} {rate:9.4g} {mean:8.4f} {speed:9,.1f} "
            f"{speed / hvd.size():9,.1f} {waiting:6.1%} {clock(self.seconds()):>9} {left:>9}{self.cost():>10}"
        )
        self.scalars(step, loss=mean, rate=rate, images_per_second=speed, waiting_for_input=waiting)

    def evaluation(self, step: int, epoch: int, found: dict[str, float], split: str) -> None:
        """Print what an evaluation of a split has found, whose time is not that of steps."""
        self.print(
            f"after {epoch} epochs: top-1 {found['top1']:.2%}, top-5 {found['top5']:.2%} of "
            f"{found['count']} images of {split}"
        )
        self.scalars(step, top1=found["top1"], top5=found["top5"])


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def scores_of(found: dict[str, float]) -> str:
    """Return the figures of ``BinaryScores``, the AUC with its standard error."""
    return (
        f"AUC {found['auc']:.5f} +/- {found['auc_error']:.5f}, log-loss {found['logloss']:.5f}, calibration "
        f"{found['calibration']:.4f} of {found['count']:,} rows"
    )
