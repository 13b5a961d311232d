"""The table that the recipes print: loss, speed, wait for input, time and cost; TensorBoard's files."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ringdance.numpy as hvd

TRAINED_ON = "train (the data has no other split: these are not validation figures)"
"""What an evaluation is of where there is nothing but what is trained on."""


class TrainingLog:
    """What rank 0 prints of a training, and the files that say which samples were used.

    Args:
        given: options of the recipe: ``price_per_hour`` and ``tensorboard``; if it has them ``time_limit``
            and ``sample_log``.
        unit: what a sample is: "images".
        samples: of an epoch.
        epochs: of the training.
        seconds: of the runs before.

    Attributes:
        samples: of all ranks since :meth:`clear`.
        waited: seconds since then in which the training waited for them.
    """

    def __init__(
        self, given: argparse.Namespace, unit: str, samples: int, epochs: float, seconds: float
    ) -> None:
        self.began, self.price = time.perf_counter() - seconds, given.price_per_hour
        self.unit, self.epoch, self.total, self.earlier = unit, samples, samples * epochs, seconds
        self.limit, used = getattr(given, "time_limit", None), getattr(given, "sample_log", None)
        self.used = Path(used) / f"rank-{hvd.rank()}.jsonl" if used else None
        if self.used:
            self.used.parent.mkdir(parents=True, exist_ok=True)
        self.board: Any = None
        if hvd.rank() == 0 and given.tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise SystemExit(f"--tensorboard: {error}: pip install 'ringdance[metrics]'") from None
            self.board = SummaryWriter(given.tensorboard)
        self.titles: tuple[str, ...] = ()
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

    def use(self, step: int, epoch: int, batch: Any) -> None:
        """Note which images this rank has used in a step."""
        if self.used:
            samples = batch.indices[batch.indices >= 0].tolist()
            with self.used.open("a") as file:
                print(json.dumps({"step": step, "epoch": epoch, "samples": samples}), file=file)

    def line(self, step: int, done: int, rate: float, figures: dict[str, float]) -> bool:
        """Print a line on the steps since the last one; return whether the time is over. Collective.

        Args:
            step: number of the last one.
            done: samples of all epochs.
            rate: of learning, in the last step.
            figures: such as "loss", of this rank; their means over the ranks are printed. "top-1": a share.
        """
        mine = np.array([*figures.values(), self.seconds() - self.earlier])
        *means, seconds = hvd.allreduce(mine, name="figures").tolist()
        if not np.isfinite(means[0]):
            raise SystemExit(diverged(f"The loss is {means[0]} at", step))
        passed = time.perf_counter() - self.mark
        speed, waiting = self.samples / passed, self.waited / passed
        left, cost = clock((self.total - done) / speed), self.cost()
        if self.titles != (titles := tuple(figures)):
            self.titles = titles
            named = "".join(f"{title:>9}" for title in titles)
            self.print(
                f"{'epoch':>8} {'step':>8} {'rate':>9}{named} {self.unit + '/s':>10} {'per rank':>9} "
                f"{'input':>6} {'time':>9} {'left':>9} {'cost':>9}"
            )
        shown = "".join(
            f"{mean:9.2%}" if title.startswith("top") else f"{mean:9.5f}"
            for title, mean in zip(titles, means, strict=True)
        )
        self.print(
            f"{done / self.epoch:8.2f} {step:8} {rate:9.4g}{shown} {speed:10,.1f} {speed / hvd.size():9,.1f} "
            f"{waiting:6.1%} {clock(self.seconds()):>9} {left:>9} {cost:>9}"
        )
        values = {**dict(zip(titles, means, strict=True)), f"{self.unit}_per_second": speed}
        self.scalars(step, rate=rate, waiting_for_input=waiting, **values)
        return bool(self.limit and seconds > self.limit)

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


def scores_of(found: dict[str, float]) -> str:
    """Return the figures of ``BinaryScores``, the AUC with its standard error."""
    return (
        f"AUC {found['auc']:.5f} +/- {found['auc_error']:.5f}, log-loss {found['logloss']:.5f}, calibration "
        f"{found['calibration']:.4f} of {found['count']:,} rows"
    )


def diverged(what: str, step: int) -> str:
    """Return the error of a training that cannot go on."""
    return (
        f"{what} step {step}: the training has diverged, and ends without another checkpoint. Try a smaller "
        "rate, or a longer warm-up."
    )
