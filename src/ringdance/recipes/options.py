"""Options of the recipes: a parser, and the types of numbers that they take."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import ringdance.numpy as hvd
from ringdance.launch.parser import Parser

T = TypeVar("T", int, float)


def number(kind: Callable[[str], T], least: float, below: float = math.inf) -> Callable[[str], T]:
    """Return the type of an option: numbers from ``least`` on, less than ``below``."""

    def parsed(text: str) -> T:
        value = kind(text)
        if not least <= value < below:
            limit = f", less than {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: give {least:g} or more{limit}")
        return value

    parsed.__name__ = kind.__name__  # for the error of what is no number
    return parsed


count, amount = number(int, 1), number(float, 0)


def widths(text: str) -> list[int]:
    """Return the widths of layers, such as those of "400,400"."""
    return [count(one) for one in text.split(",")]


class Options(Parser):
    """A parser of options whose errors are printed by one rank."""

    def error(self, message: str) -> NoReturn:
        """End all ranks, which have the same options."""
        hvd.init()
        if hvd.rank() == 0:
            super().error(message)
        sys.exit(2)
