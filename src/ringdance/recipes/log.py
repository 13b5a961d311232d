"""What the recipes' tables have in common: time and money so far, the wait for input, TensorBoard's files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

import ringdance.numpy as hvd


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


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
