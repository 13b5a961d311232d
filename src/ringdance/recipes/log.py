"""The table that the recipes print: loss, speed, wait for input, time and cost; TensorBoard's files."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import ringdance.numpy as hvd
from ringdance.errors import optional

TRAINED_ON = "train (the data has no other split: these are not validation figures)"
"""What an evaluation is of where there is nothing but what is trained on."""


@dataclass
class Position:
    """Where a training run is.

    Attributes:
        step: Steps completed, in all epochs.
        epoch: The current epoch, from 0.
        done: Samples of this epoch.
        seconds: So far, including earlier runs.
        cost: Of those seconds for which a run was given a price, at that run's price.
        priced: Seconds that ``cost`` counts.
        best: The best evaluation.
        worse: Evaluations since then.
    """

    step: int = 0
    epoch: int = 0
    done: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    priced: float = 0.0
    best: float = 0.0
    worse: int = 0


class TrainingLog:
    """What rank 0 prints of a training, and the files that say which samples were used.

    Args:
        given: options of the recipe: ``price_per_hour`` and ``tensorboard``; if it has them ``time_limit``
            and ``sample_log``.
        unit: what a sample is: "images".
        samples: of an epoch.
        epochs: of the training.
        at: Where earlier runs ended, with their time and cost.

    Attributes:
        samples: of all ranks since :meth:`clear`.
        waited: seconds since then in which the training waited for them.
    """

    def __init__(
        self, given: argparse.Namespace, unit: str, samples: int, epochs: float, at: Position
    ) -> None:
        self.began, self.price = time.perf_counter() - at.seconds, given.price_per_hour
        self.unit, self.epoch, self.total, self.earlier = unit, samples, samples * epochs, replace(at)
        self.limit, used = getattr(given, "time_limit", None), getattr(given, "sample_log", None)
        self.used = Path(used) / f"rank-{hvd.rank()}.jsonl" if used else None
        if self.used:
            self.used.parent.mkdir(parents=True, exist_ok=True)
        self.board: Any = None
        if hvd.rank() == 0 and given.tensorboard:
            board = optional("tensorboardX", SystemExit, "--tensorboard needs tensorboardX")
            self.board = board.SummaryWriter(given.tensorboard)
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
        mine = np.array([*figures.values(), self.seconds() - self.earlier.seconds])
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

    def add_up(self, at: Position) -> None:
        """Write the time and the cost so far into a position."""
        at.seconds, at.cost, at.priced = self.seconds(), self.earlier.cost, self.earlier.priced
        if self.price is not None:
            mine = at.seconds - self.earlier.seconds
            at.cost, at.priced = at.cost + self.price * mine / 3600, at.priced + mine

    def cost(self) -> str:
        """Return the cost so far, of each run at its own price; "-" if no run was given one."""
        self.add_up(now := Position())
        return f"{now.cost:.2f}" if now.priced else "-"

    def scalars(self, step: int, **values: float) -> None:
        """Write values for TensorBoard, and begin to count."""
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        self.clear()

    def close(self) -> None:
        """Print the time and the cost of all; complete TensorBoard's files."""
        self.add_up(now := Position())
        cost = f", cost {self.cost()}" if now.priced else ""
        if now.priced and now.seconds - now.priced >= 1:
            cost += f" for {clock(now.priced)} of it: the rest was given no --price-per-hour"
        self.print(f"done in {clock(now.seconds)}{cost}")
        if self.board is not None:
            self.board.close()


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def scores_of(found: dict[str, float]) -> str:
    """Return the figures of ``BinaryScores``, the AUC with its standard error."""
    rows = f"{found['count']:,} rows"
    if np.isnan(found["auc"]):
        kind = "is 1" if found["positives"] else "is 0"
        return f"log-loss {found['logloss']:.5f} of {rows}; no AUC, as each label {kind}"
    return (
        f"AUC {found['auc']:.5f} +/- {found['auc_error']:.5f}, log-loss {found['logloss']:.5f}, calibration "
        f"{found['calibration']:.4f} of {rows}"
    )


def diverged(what: str, step: int) -> str:
    """Return the error of a training that cannot go on."""
    return (
        f"{what} step {step}: the training has diverged, and ends without another checkpoint. Try a smaller "
        "rate, or a longer warm-up."
    )
