"""Random programs on loopback worlds. ``programs.worlds`` replays a failing seed (see there)."""

from __future__ import annotations

import os

import pytest
from programs.worlds import try_seeds
from sampled import drawn, seed_of_the_day

MANY = 2000  # programs per day in make test-all


@pytest.mark.limit(200)
def test_programs() -> None:
    assert not try_seeds(drawn("programs", range(1000), 10))


@pytest.mark.limit(120)
def test_one_wrong_call_fails_on_all_members_and_nothing_else_does() -> None:
    assert not try_seeds(drawn("programs with a wrong call", range(1000), 5), mismatch=True)


@pytest.mark.slow
@pytest.mark.limit(3600)
@pytest.mark.parametrize("mismatch", [False, True])
def test_many_programs(mismatch: bool) -> None:
    count, first = MANY // 10 if mismatch else MANY, seed_of_the_day() % 1000 * MANY
    assert not try_seeds(range(first, first + count), mismatch, os.cpu_count() or 1)
