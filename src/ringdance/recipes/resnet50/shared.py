"""What train_torch.py and train_keras.py share: options, the data, and what rank 0 prints."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from presets import PRESETS, Preset  # type: ignore[import-not-found]  # beside this file

import ringdance.numpy as hvd
from ringdance.data import Batch, Dataset, Synthetic

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's pixels, R, G, B
_POSITIVE = ("epochs", "steps", "batch_size", "accumulate", "checkpoint_every", "log_every", "width")


def parser(manual: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both have; a script may add its own."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=manual, formatter_class=form, allow_abbrev=False)
    add = made.add_argument
    names = f"default: 8xV100; {', '.join(PRESETS)}"
    add("--preset", default="8xV100", choices=PRESETS, metavar="NAME", help=names)
    add("--data", metavar="DIR", help="a data set that `ringdance data prepare` has written")
    add("--synthetic", action="store_true", help="random pixels instead of data")
    add("--synthetic-images", type=int, default=1_281_167, metavar="N", help="default: 1,281,167")
    add("--epochs", type=int, metavar="N", help="length of the schedule")
    add("--steps", type=int, metavar="N", help="end after so many steps of this run, with a checkpoint")
    add("--batch-size", type=int, metavar="N", help="images for each rank and pass")
    add("--accumulate", type=int, default=1, metavar="N", help="passes in each step; default: 1")
    add("--optimizer", choices=("sgd", "lars"))
    add("--rate", type=float, metavar="R", help="peak learning rate of the whole batch, not scaled further")
    add("--precision", choices=("float32", "float16", "bfloat16"))
    add("--image-size", type=int, metavar="PIXELS")
    add("--seed", type=int, default=0)
    add("--checkpoints", metavar="DIR", help="write them there, also after each epoch; go on from the newest")
    add("--checkpoint-every", type=int, default=1000, metavar="STEPS", help="default: 1000")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints; default: 3")
    add("--evaluate-every", type=int, default=1, metavar="EPOCHS", help="default: 1; 0: never")
    add("--log-every", type=int, default=20, metavar="STEPS", help="default: 20")
    add("--price-per-hour", type=float, metavar="P", help="of all machines together: print the cost so far")
    add("--tensorboard", metavar="DIR", help="write loss, rate, speed and accuracy there")
    add("--sample-log", metavar="DIR", help="write there which images each rank used in each step")
    return made


def read(made: argparse.ArgumentParser) -> tuple[argparse.Namespace, Preset]:
    """Read the command line; return the options, and the preset with what they override."""
    given = made.parse_args()
    if bool(given.data) == given.synthetic:
        made.error("give either --data DIR or --synthetic")
    for name in _POSITIVE:
        if getattr(given, name, None) is not None and getattr(given, name) < 1:
            made.error(f"--{name.replace('_', '-')} {getattr(given, name)}: give 1 or more")
    names = ("epochs", "batch_size", "optimizer", "precision", "image_size")
    overridden = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    return given, replace(PRESETS[given.preset], **overridden)


def opened(given: argparse.Namespace) -> tuple[Any, Any]:
    """Return the data for training and for evaluation: `train` again, if there is no `validation`."""
    if given.synthetic:
        return (Synthetic(given.synthetic_images),) * 2
    data = Dataset.open(given.data, "train")
    found = (Path(given.data) / "validation.json").exists()
    return data, Dataset.open(given.data, "validation") if found else data


class Log:
    """The table on rank 0, with time and money so far, TensorBoard's files, and which images were used.

    Args:
        given: the options.
        images: of an epoch.
        epochs: of the schedule.
        step, epoch, done: where the training is; ``done``: images of the epoch.
        seconds: of the runs before.
    """

    def __init__(
        self, given: argparse.Namespace, images: int, epochs: float, step: int, epoch: int, done: int,
        seconds: float,
    ) -> None:  # fmt: skip
        self.began = time.perf_counter() - seconds
        self.price, self.epoch, self.total, self.board = given.price_per_hour, images, images * epochs, None
        self.samples = Path(given.sample_log) / f"rank-{hvd.rank()}.jsonl" if given.sample_log else None
        self.clear()
        if hvd.rank() == 0 and given.tensorboard:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(given.tensorboard)
        if step:
            self.print(f"going on after step {step}: epoch {epoch}, {done} of its images are done")
        self.print(
            f"{'epoch':>8} {'step':>8} {'rate':>9} {'loss':>8} {'images/s':>9} {'per rank':>9} {'input':>6} "
            f"{'time':>9} {'left':>9}{'cost':>10}"
        )

    def clear(self) -> None:
        """Begin to count."""
        self.mark, self.images, self.waited = time.perf_counter(), 0, 0.0

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if hvd.rank() == 0:
            print(text, flush=True)

    def seconds(self) -> float:
        """Return the time so far, with that of the runs before."""
        return time.perf_counter() - self.began

    def timed(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and add up how long the training waits for them."""
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - began
            if batch is None:
                return
            self.images += batch.count
            yield batch

    def used(self, step: int, epoch: int, batch: Batch) -> None:
        """Note which images this rank has used in a step."""
        if self.samples:
            used = batch.indices[batch.indices >= 0].tolist()
            with self.samples.open("a") as file:
                print(json.dumps({"step": step, "epoch": epoch, "samples": used}), file=file)

    def line(self, step: int, done: int, rate: float, loss: float) -> None:
        """Print a line on the steps since the last one; ``done``: images of all epochs. Collective."""
        mean = float(hvd.allreduce(np.float32(loss), name="loss"))
        passed = time.perf_counter() - self.mark
        speed, waiting = self.images / passed, self.waited / passed
        left = clock((self.total - done) / speed)
        self.print(
            f"{done / self.epoch:8.2f} {step:8} {rate:9.4g} {mean:8.4f} {speed:9,.1f} "
            f"{speed / hvd.size():9,.1f} {waiting:6.1%} {clock(self.seconds()):>9} {left:>9}{self.cost():>10}"
        )
        self.scalars(step, loss=mean, rate=rate, images_per_second=speed, waiting_for_input=waiting)
        self.clear()

    def evaluation(self, step: int, epoch: int, found: dict[str, float]) -> None:
        """Print what an evaluation has found, whose time is not that of steps."""
        self.print(
            f"after {epoch} epochs: top-1 {found['top1']:.2%}, top-5 {found['top5']:.2%} of "
            f"{found['count']} images"
        )
        self.scalars(step, top1=found["top1"], top5=found["top5"])
        self.clear()

    def cost(self) -> str:
        """Return the cost so far."""
        return f"{self.price * self.seconds() / 3600:.2f}" if self.price is not None else "-"

    def scalars(self, step: int, **values: float) -> None:
        """Write values for TensorBoard."""
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Print the time and the cost of all; complete TensorBoard's files."""
        cost = f", cost {self.cost()}" if self.price is not None else ""
        self.print(f"done in {clock(self.seconds())}{cost}")
        if self.board is not None:
            self.board.close()


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
