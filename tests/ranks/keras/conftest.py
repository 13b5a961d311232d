"""Rank tests of ringdance.keras. KERAS_BACKEND is chosen beforehand: see tests/dropin/test_keras.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # makes `nets` importable

from sampled import case_of, drawn

BACKEND = os.environ.get("KERAS_BACKEND")  # None: Keras 2
OTHERS = ("tensorflow", "jax")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add a time limit in minutes, and leave to make test-all repeats of what one backend covers.

    TensorFlow and JAX compile a program in most tests. On PyTorch, make test runs all tests, but each day
    only half of the cases of tests with parameters. Tests marked ``every_backend`` run daily on PyTorch, and
    daily on one of the other backends, or on both if ``daily`` is set.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.limit(300))
            if not is_due(item):
                item.add_marker(pytest.mark.slow)


def is_due(item: pytest.Item) -> bool:
    """Return True if a test is due today on this backend."""
    marker = item.get_closest_marker("every_backend")
    if BACKEND == "torch" and marker is None:
        return not hasattr(item, "callspec") or bool(drawn(case_of(item), (False, True), 1)[0])
    if marker is None or BACKEND not in OTHERS or marker.kwargs.get("daily"):
        return marker is not None
    return BACKEND in drawn(case_of(item), OTHERS, 1)
