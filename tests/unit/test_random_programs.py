"""Random programs on loopback worlds; a seed that fails is played again by `programs.worlds` (see there)."""

from __future__ import annotations

import os

import pytest
from programs.worlds import try_seeds
from sampled import drawn

MANY = 10_000


@pytest.mark.limit(200)
def test_programs() -> None:
    assert not try_seeds(drawn("programs", range(1000), 16))


@pytest.mark.limit(120)
def test_one_wrong_call_fails_on_all_members_and_nothing_else_does() -> None:
    assert not try_seeds(drawn("programs with a wrong call", range(1000), 8), mismatch=True)


@pytest.mark.slow
@pytest.mark.limit(3600)
@pytest.mark.parametrize("mismatch", [False, True])
def test_many_programs(mismatch: bool) -> None:
    count = MANY // 10 if mismatch else MANY
    processes = os.cpu_count() or 1
    assert not try_seeds(range(count), mismatch, processes)
