"""Lets the rank tests import the helpers in the directory above, and run again with other settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import rank_and_size

# TensorFlow gets one thread for its operations: nothing may hang then. What it says at import is not wanted.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if os.environ.get("TEST_DEVICE", "cpu") != "cpu":  # benchmarks/gpu_check.py
    import torch

    torch.set_default_device(os.environ["TEST_DEVICE"])

TINY = {"RINGDANCE_CHUNK_BYTES": "4096", "RINGDANCE_SMALL_BYTES": "64"}
WAYS = {
    "window": {},
    "tiny": TINY,
    "messages": {"RINGDANCE_WINDOW": "0"},
    "tiny-messages": {"RINGDANCE_WINDOW": "0", **TINY},
}
# make test has all ways on 3 ranks, where blocks are unequal and orders of summation differ; all types there
# by the window, elsewhere those whose arithmetic differs. All types of TensorFlow: dropin/contract.
FAST_WAY = {1: "window", 2: "window", 4: "tiny-messages"}
FAST_TYPES = ("bool", "uint8", "int64", "bfloat16", "float32")


def later(item: pytest.Item) -> bool:
    """Whether make test leaves it out: another number of ranks, way or type shows the same."""
    size, name = rank_and_size()[1], item.path.stem
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    way, dtype = params.get("way"), params.get("dtype", "float32")
    if name in ("test_tensorflow_collectives", "test_tensorflow_sparse"):
        return dtype not in ("bfloat16", "float16", "float32")
    if name == "test_jax_order":
        return way in ("tokens", "callback")
    if name == "test_jax_transforms":
        return params.get("kind", "allreduce") not in ("allreduce", "alltoall")
    if size != 3:
        unusual = way in WAYS and (way != FAST_WAY.get(size) or dtype not in FAST_TYPES)
        return name == "test_collectives_stall" or unusual
    return way in WAYS and way != "window" and dtype not in FAST_TYPES


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(later, items):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How bytes move: shared memory or MPI's messages, pieces of usual size or tiny ones."""
    from other_settings import other_settings

    with other_settings(WAYS[request.param]):
        yield request.param
