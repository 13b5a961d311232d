"""What a binding lets the tuner change between two steps; no framework is known here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Tunable(NamedTuple):
    """A value of this process.

    Attributes:
        get: returns it, a number; None where this process has no choice.
        set: changes it from the next step on; called by the thread that ends a step.
        most: returns the largest value to be tried.
    """

    get: Callable[[], int | None]
    set: Callable[[int], None]
    most: Callable[[], int]


tunables: dict[str, Tunable] = {}
"""By the name of the value: ``overlap`` (0 or 1) and ``threads``."""
