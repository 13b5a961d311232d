"""Command-line options that are shared by several recipes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import NoReturn

import ringdance.numpy as hvd
from ringdance.launch.parser import Parser, at_least, positive

number, count, amount = at_least, positive, at_least(float, 0)


def widths(text: str) -> list[int]:
    """Parse layer widths, such as "400,400"."""
    return [count(word) for word in text.split(",")]


class Options(Parser):
    """Argument parser for recipes. Only rank 0 prints errors."""

    def add_shared(self, keep: int, log_every: int) -> None:
        """Add the options that ``Training`` reads. ``keep`` and ``log_every`` are default values."""
        add = self.add_argument
        limit = "stop after {} of this run, and write a checkpoint"
        add("--steps", type=count, metavar="N", help=limit.format("N steps"))
        add("--time-limit", type=amount, metavar="S", help=limit.format("S seconds"))
        add("--seed", type=number(int, 0), default=0)
        text = "write checkpoints to DIR (also after each epoch), resume from the newest, keep the best model"
        add("--checkpoints", metavar="DIR", help=text)
        add("--checkpoint-every", type=count, default=1000, metavar="STEPS", help="default: 1000")
        add("--keep", type=count, default=keep, metavar="N", help=f"checkpoints to keep; default: {keep}")
        add("--export", metavar="MODEL", help="export the best model (without --checkpoints, the last one)")
        add("--log-every", type=count, default=log_every, metavar="STEPS", help=f"default: {log_every}")
        text = "price of all machines per hour, to print the cost so far"
        add("--price-per-hour", type=amount, metavar="P", help=text)
        add("--tensorboard", metavar="DIR", help="write losses, rate, speed and evaluations to DIR")

    def add_images(self, presets: Collection[str], optimizers: Collection[str]) -> None:
        """Add the options of recipes that train on images."""
        add = self.add_argument
        names = f"default: 8xV100; {', '.join(presets)}"
        add("--preset", default="8xV100", choices=presets, metavar="NAME", help=names)
        add("--epochs", type=count, metavar="N", help="length of the schedule, in epochs")
        text = "images per rank and pass; the learning rate is scaled in proportion"
        add("--batch-size", type=count, metavar="N", help=text)
        add("--optimizer", choices=optimizers)
        text = "peak learning rate for the global batch, not scaled further"
        add("--rate", type=amount, metavar="R", help=text)
        add("--precision", choices=("float32", "float16", "bfloat16"))
        text = "threads that decode images on each rank; default: the rank's share of the cores"
        add("--threads", type=count, metavar="N", help=text)
        text = "evaluate every EPOCHS epochs and after the last one; 0: never; default: 1"
        add("--evaluate-every", type=int, default=1, metavar="EPOCHS", help=text)
        text = "only evaluate --weights, or the best (or else the newest) model in --checkpoints"
        add("--evaluate", action="store_true", help=text)
        add("--sample-log", metavar="DIR", help="log to DIR which images each rank uses in each step")
        self.add_shared(keep=3, log_every=20)

    def read(self) -> argparse.Namespace:
        """Parse an image recipe's command line, and check the arguments of ``--evaluate``."""
        given = self.parse_args()
        if given.evaluate and bool(given.checkpoints) == bool(given.weights):
            self.error("--evaluate needs either --checkpoints DIR or --weights FILE")
        return given

    def error(self, message: str) -> NoReturn:
        """Exit on all ranks. The error is the same on all ranks, so only rank 0 prints it."""
        hvd.init()
        if hvd.rank() == 0:
            super().error(message)
        sys.exit(2)
