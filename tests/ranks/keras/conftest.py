"""Rank tests of ringdance.keras. KERAS_BACKEND is chosen before: see tests/dropin/test_keras.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # for `nets`

from sampled import case_of, drawn

BACKEND = os.environ.get("KERAS_BACKEND")  # None: Keras 2
OTHERS = ("tensorflow", "jax")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add a limit of minutes, and leave to make test-all what one backend shows as well as three.

    TensorFlow and JAX compile a program in most tests. make test runs all on PyTorch, and half of the cases
    of tests with parameters on a day. What is marked ``every_backend`` it runs daily on PyTorch, and on one
    of the others by the day; on both if ``daily`` is set.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.limit(300))
            if not is_due(item):
                item.add_marker(pytest.mark.slow)


def is_due(item: pytest.Item) -> bool:
    """Whether today a test has its turn on this backend."""
    marker = item.get_closest_marker("every_backend")
    if BACKEND == "torch" and marker is None:
        return not hasattr(item, "callspec") or bool(drawn(case_of(item), (False, True), 1)[0])
    if marker is None or BACKEND not in OTHERS or marker.kwargs.get("daily"):
        return marker is not None
    return BACKEND in drawn(case_of(item), OTHERS, 1)
