"""Rank tests of ringdance.keras. KERAS_BACKEND is chosen before: see tests/dropin/test_keras.py."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # for `nets`

# Not every environment has every framework.
collect_ignore_glob = [] if importlib.util.find_spec("keras") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Programs are compiled in most tests: minutes, where a machine does other things as well."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.limit(300))
