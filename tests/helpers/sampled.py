"""The seed of the day: which cases of a sweep `make test` runs. `make test-all` runs all of them.

Each sweep has its own order, and each day takes the next part of it: every case has its turn within as many
days as there are parts. TEST_SEED=N repeats a day's choice, and a failing test run prints it.
tests/runners/run.py sets it. It also sets TEST_WHOLE when it runs slow tests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Sequence
from datetime import date
from typing import Any

import pytest


def seed_of_the_day() -> int:
    """Return TEST_SEED, or the number of the day, which increases by one each day."""
    return int(os.environ.get("TEST_SEED") or date.today().toordinal())


def drawn(name: str, cases: Sequence[Any], count: int) -> list[Any]:
    """Return the cases that are due today.

    Args:
        name: Name of the sweep, which determines its order.
        cases: All cases, equal on all ranks.
        count: Cases per day.
    """
    order = list(cases)
    random.Random(name).shuffle(order)
    first = seed_of_the_day() * count
    return [order[(first + number) % len(order)] for number in range(min(count, len(order)))]


def part(name: str, cases: Sequence[Any], count: int) -> list[Any]:
    """Return the cases for a loop within a test: today's, or all of them with TEST_WHOLE.

    Args:
        name: Name of the sweep, which determines its order.
        cases: All cases, equal on all ranks.
        count: Cases per day.
    """
    return list(cases) if os.environ.get("TEST_WHOLE") else drawn(name, cases, count)


def sampled(name: str, cases: Sequence[Any], count: int, always: Collection[Any] = ()) -> list[Any]:
    """Return all cases as parameters for pytest. Cases that are not due today are marked slow.

    Args:
        name: Name of the sweep, which determines its order.
        cases: All cases, equal on all ranks.
        count: Cases per day, in addition to those in ``always``.
        always: Cases that run every day.
    """
    due = [*always, *drawn(name, [case for case in cases if case not in always], count)]
    return [pytest.param(case, marks=[] if case in due else [pytest.mark.slow]) for case in cases]


def sampled_rows(name: str, cases: Sequence[Any], count: int, always: Collection[Any] = ()) -> list[Any]:
    """Like ``sampled``, for a test with several arguments: each case has a value for each of them."""
    parameters = sampled(name, cases, count, always)
    return [pytest.param(*parameter.values[0], marks=parameter.marks) for parameter in parameters]


def case_of(item: pytest.Item, without: str = "") -> str:
    """Return a test's name and its parameters' positions, equal on all ranks.

    Args:
        item: Test whose name is returned.
        without: Name of a parameter to leave out.
    """
    assert isinstance(item, pytest.Function)
    places = item.callspec.indices.items() if hasattr(item, "callspec") else ()
    return f"{item.originalname} {sorted(pair for pair in places if pair[0] != without)}"
