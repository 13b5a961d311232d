"""Lets the rank tests import the helpers in the folder above, and run again with other settings."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import rank_and_size

# Not every environment has every framework: those for other MPI libraries have none.
NEEDS = {
    "test_torch_*.py": ["torch"], "test_jax_*.py": ["jax", "optax"],
    "test_tensorflow_*.py": ["tensorflow"],
}  # fmt: skip
collect_ignore_glob = [
    pattern for pattern, names in NEEDS.items() if not all(map(importlib.util.find_spec, names))
]

# 4 ranks show nothing of a binding that 3 do not, and 4 processes that import frameworks take minutes.
# Of the order of exchanges 3 show nothing that 2 do not, and its tests wait a lot.
FRAMEWORKS = ("test_jax_", "test_tensorflow_")
ORDER = "test_jax_order"


def only_in_slow_runs(path: Path) -> bool:
    most = 2 if path.stem == ORDER else 3
    return path.name.startswith(FRAMEWORKS) and rank_and_size()[1] > most


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if only_in_slow_runs(collection_path) and config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if only_in_slow_runs(item.path):
            item.add_marker(pytest.mark.slow)


# TensorFlow gets one thread for its operations: nothing may hang then. What it says at import is not wanted.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

TINY = {"RINGDANCE_PIECE_BYTES": "4096", "RINGDANCE_SMALL_BYTES": "64"}
WAYS = {
    "window": {},
    "tiny": TINY,
    "messages": {"RINGDANCE_WINDOW": "0"},
    "tiny-messages": {"RINGDANCE_WINDOW": "0", **TINY},
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How bytes move: shared memory or MPI's messages, pieces of usual size or tiny ones."""
    from other_settings import other_settings

    with other_settings(WAYS[request.param]):
        yield request.param
