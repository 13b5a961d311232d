"""Keras on each of its backends: the tests in tests/keras, in jobs of 2 and 3 ranks, and the example."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from run import run_ranks

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 500.0  # seconds for one job; plenty for a machine that does other things as well

pytestmark = [
    pytest.mark.limit(2 * LIMIT),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs Keras"),
]
each_backend = pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])


@pytest.fixture
def environ(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


@each_backend
@pytest.mark.parametrize(("size", "which"), [(2, ""), (3, "twenty_steps or overflow or process_set")])
@pytest.mark.usefixtures("environ")
def test_on_ranks(size: int, which: str) -> None:
    # Keras itself warns a thousand times of how it converts arrays.
    options = ["-rfE", "-W", "ignore::DeprecationWarning", "-k", which]
    outcome = run_ranks(TESTS / "keras", size, options, LIMIT)
    assert not outcome.problems, outcome
    assert outcome.counts["passed"] >= 11
