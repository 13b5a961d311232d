"""Options of the recipes: a parser, and the types of numbers that they take."""

from __future__ import annotations

import sys
from typing import NoReturn

import ringdance.numpy as hvd
from ringdance.launch.parser import Parser, at_least, positive

number, count, amount = at_least, positive, at_least(float, 0)


def widths(text: str) -> list[int]:
    """Return the widths of layers, such as those of "400,400"."""
    return [count(one) for one in text.split(",")]


class Options(Parser):
    """A parser of options whose errors are printed by one rank; it has those of all recipes."""

    def add_shared(self, keep: int, log_every: int) -> None:
        """Add the options that ``Training`` reads; defaults of two of them."""
        add = self.add_argument
        text = "end after so many steps of this run, with a checkpoint"
        add("--steps", type=count, metavar="N", help=text)
        add("--time-limit", type=amount, metavar="S", help="the same after so many seconds of this run")
        add("--seed", type=number(int, 0), default=0)
        text = "write them there, also after each epoch; go on from the newest; keep the best model"
        add("--checkpoints", metavar="DIR", help=text)
        add("--checkpoint-every", type=count, default=1000, metavar="STEPS", help="default: 1000")
        add("--keep", type=count, default=keep, metavar="N", help=f"checkpoints; default: {keep}")
        add("--export", metavar="MODEL", help="write the best model (without --checkpoints: the last)")
        add("--log-every", type=count, default=log_every, metavar="STEPS", help=f"default: {log_every}")
        text = "of all machines together: print what the time so far costs"
        add("--price-per-hour", type=amount, metavar="P", help=text)
        add("--tensorboard", metavar="DIR", help="write losses, rate, speed and evaluations there")

    def error(self, message: str) -> NoReturn:
        """End all ranks, which have the same options."""
        hvd.init()
        if hvd.rank() == 0:
            super().error(message)
        sys.exit(2)
