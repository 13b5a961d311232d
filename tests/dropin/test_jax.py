"""JAX in processes of another kind than those of tests/ranks: the tests in tests/jax_jobs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from run import run_ranks

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 300.0  # seconds for one job; plenty for a machine that does other things as well


@pytest.mark.limit(2 * LIMIT)
@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="needs JAX and optax")
@pytest.mark.parametrize("size", [2, 3])
def test_several_devices_in_each_process(size: int) -> None:
    outcome = run_ranks(TESTS / "jax_jobs", size, ["-rfE"], LIMIT)
    assert not outcome.problems, outcome
    assert outcome.counts["passed"] + outcome.counts["skipped"] == 5
