"""Values that a binding lets the tuner change between two steps, independent of the framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Tunable(NamedTuple):
    """A value of this process that can be tuned.

    Attributes:
        get: Returns the value, a number, or None if this process has no choice.
        set: Changes the value from the next step on. Called on the thread that ends a step.
        most: Returns the largest value to try.
    """

    get: Callable[[], int | None]
    set: Callable[[int], None]
    most: Callable[[], int]


tunables: dict[str, Tunable] = {}
"""Tunables by name: ``overlap`` (0 or 1) and ``threads``."""
