"""Lets the rank tests import the helpers in the folder above, and run again with other settings."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

# The environments for other MPI libraries are without PyTorch: there NumPy's tests are enough.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_torch_*.py"]

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
