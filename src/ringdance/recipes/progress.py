"""Report the progress of a training run in printed lines and as TensorBoard scalars."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import ringdance.numpy as hvd
from ringdance.errors import optional


class ProgressTable:
    """Prints the progress of a training run as a table. A line covers the steps since the previous line.

    Args:
        given: Options of the recipe (see ``Options``).
        unit: Name of the samples, such as "images".
        samples: Number of samples per epoch.
        epochs: Number of epochs in the training run.

    Attributes:
        began: ``time.perf_counter()`` at the start, minus the duration of earlier runs.
    """

    def __init__(self, given: argparse.Namespace, unit: str, samples: int, epochs: float) -> None:
        self._given, self._unit, self._samples, self._epochs = given, unit, samples, epochs
        self._titles: tuple[str, ...] = ()
        self._board: Any = None
        if given.tensorboard:
            board: Any = optional("tensorboardX", SystemExit, "--tensorboard needs tensorboardX")
            self._board = board.SummaryWriter(given.tensorboard) if hvd.rank() == 0 else None
        self.began = self._began_here = time.perf_counter()
        self.clear()

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if hvd.rank() == 0:
            print(text, flush=True)

    def seconds(self) -> float:
        """Return the elapsed time in seconds, including earlier runs."""
        return time.perf_counter() - self.began

    def cost(self) -> str:
        """Return the cost so far, or "-" if ``--price-per-hour`` was not given."""
        price = self._given.price_per_hour
        return "-" if price is None else f"{self.seconds() / 3600 * price:.2f}"

    def clear(self) -> None:
        """Reset the counters for the next line."""
        self._mark, self._counted, self._waited = time.perf_counter(), 0, 0.0

    def timed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches, and measure how long training waits for them."""
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self._waited += time.perf_counter() - began
            if batch is None:
                return
            self._counted += batch.count
            yield batch

    def line(self, figures: dict[str, float], rate: float, step: int, done: int) -> bool:
        """Print the next line of the table. Collective.

        Args:
            figures: This rank's metrics for the steps since the previous line. The first must be the loss.
            rate: Current learning rate.
            step: Number of steps completed.
            done: Number of samples used for training so far, in all epochs.

        Returns:
            True if the run has reached ``--time-limit`` on any rank.

        Raises:
            SystemExit: The loss is not finite.
        """
        limit = self._given.time_limit
        over = limit and time.perf_counter() - self._began_here > limit
        local = np.array([*figures.values(), float(bool(over))])
        *means, late = hvd.allreduce(local, name="figures").tolist()
        if not np.isfinite(means[0]):
            raise SystemExit(diverged(f"The loss is {means[0]} at", step))
        by_title = dict(zip(figures, means, strict=True))
        elapsed = time.perf_counter() - self._mark
        speed, waiting = self._counted / elapsed, self._waited / elapsed
        if self._titles != tuple(by_title):
            self._titles = tuple(by_title)
            named = "".join(f"{title:>9}" for title in by_title)
            self.print(
                f"{'epoch':>8} {'step':>8} {'rate':>9}{named} {self._unit + '/s':>10} {'per rank':>9} "
                f"{'input':>6} {'time':>9} {'left':>9} {'cost':>9}"
            )
        shown = "".join(
            f"{mean:9.2%}" if title.startswith("top") else f"{mean:9.5f}"
            for title, mean in by_title.items()
        )
        left = clock((self._samples * self._epochs - done) / speed)
        self.print(
            f"{done / self._samples:8.2f} {step:8} {rate:9.4g}{shown} {speed:10,.1f} "
            f"{speed / hvd.size():9,.1f} {waiting:6.1%} {clock(self.seconds()):>9} {left:>9} {self.cost():>9}"
        )
        speeds = {"rate": rate, "waiting_for_input": waiting, f"{self._unit}_per_second": speed}
        self.scalars(step, speeds | by_title)
        return late > 0

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write scalars for TensorBoard, and reset the counters for the next line."""
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        self.clear()

    def close(self) -> None:
        """Close the TensorBoard files."""
        if self._board is not None:
            self._board.close()


def diverged(what: str, step: int) -> str:
    """Return the error message for a run that has diverged."""
    return (
        f"{what} step {step}: training has diverged. It stops without writing another checkpoint. Try a "
        "lower learning rate or a longer warm-up."
    )


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
