"""The seed of the day: which cases of a sweep `make test` runs. `make test-all` runs all of them.

Each sweep has an order of its own, of which a day takes the next part: every case has its turn within
as many days as there are parts. TEST_SEED=N repeats a day's choice; a test run that fails prints it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from datetime import date
from typing import Any

import pytest


def seed_of_the_day() -> int:
    """Return TEST_SEED, or the day's number: it goes up by one each day."""
    return int(os.environ.get("TEST_SEED") or date.today().toordinal())


def drawn(name: str, cases: Sequence[Any], count: int) -> list[Any]:
    """Return the cases that are due today.

    Args:
        name: Of the sweep: each has an order of its own.
        cases: All cases, equal on all ranks.
        count: Cases in a day.
    """
    order = list(cases)
    random.Random(name).shuffle(order)
    first = seed_of_the_day() * count
    return [order[(first + number) % len(order)] for number in range(min(count, len(order)))]


def sampled(name: str, cases: Sequence[Any], count: int, always: Collection[Any] = ()) -> list[Any]:
    """Return all cases as parameters for pytest: those that are not due today are slow.

    Args:
        name: Of the sweep: each has an order of its own.
        cases: All cases, equal on all ranks.
        count: Cases in a day, besides those of every day.
        always: Cases that run every day.
    """
    due = [*always, *drawn(name, [case for case in cases if case not in always], count)]
    return [pytest.param(case, marks=[] if case in due else [pytest.mark.slow]) for case in cases]
