"""Rank tests of ringdance.keras. KERAS_BACKEND is chosen before: see tests/dropin/test_keras.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # for `nets`

def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add a limit of minutes, and leave to make test-all what one backend shows as well as three.

    TensorFlow and JAX compile a program in most tests: make test runs all on PyTorch, and on those two
    what is marked ``every_backend``.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.limit(300))
            if os.environ.get("KERAS_BACKEND") != "torch" and not item.get_closest_marker("every_backend"):
                item.add_marker(pytest.mark.slow)
