"""The seed of the day: which cases of a sweep `make test` runs. `make test-all` runs all of them.

Each sweep has an order of its own, of which a day takes the next part: every case has its turn within
as many days as there are parts. TEST_SEED=N repeats a day's choice; a test run that fails prints it.
tests/runners/run.py sets it, and TEST_WHOLE where it runs slow tests.
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


def part(name: str, cases: Sequence[Any], count: int) -> list[Any]:
    """Return the cases of a loop within a test: those that are due today, all with TEST_WHOLE.

    Args:
        name: Of the sweep: each has an order of its own.
        cases: All cases, equal on all ranks.
        count: Cases in a day.
    """
    return list(cases) if os.environ.get("TEST_WHOLE") else drawn(name, cases, count)


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


def sampled_rows(name: str, cases: Sequence[Any], count: int, always: Collection[Any] = ()) -> list[Any]:
    """Return what ``sampled`` returns, for a test with several arguments: each case has a value for each."""
    found = sampled(name, cases, count, always)
    return [pytest.param(*one.values[0], marks=one.marks) for one in found]


def case_of(item: pytest.Item, without: str = "") -> str:
    """Return a test's name and the places of its parameters, equal on all ranks.

    Args:
        item: The test.
        without: A parameter to leave out.
    """
    assert isinstance(item, pytest.Function)
    places = item.callspec.indices.items() if hasattr(item, "callspec") else ()
    return f"{item.originalname} {sorted(pair for pair in places if pair[0] != without)}"
