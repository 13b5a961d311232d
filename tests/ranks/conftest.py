"""Lets the rank tests import the helpers in the directory above, and run again with other settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sampled import case_of, drawn
from this_rank import rank_and_size

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
# make test has all ways on 3 ranks, where blocks are unequal and orders of summation differ: each case by the
# window and by one other way, which changes from day to day. All types are there by the window, elsewhere
# the types whose arithmetic differs. All types of TensorFlow: dropin/contract.
FAST_WAY = {1: "window", 2: "window", 4: "tiny-messages"}
OTHER_WAYS = tuple(WAYS)[1:]
TENSORFLOW = tuple(f"test_tensorflow_{name}" for name in ("collectives", "gradients", "sparse", "tape"))
FAST_TYPES = ("bool", "uint8", "int64", "bfloat16", "float32")


def later(item: pytest.Item) -> bool:
    """Whether make test leaves it out: another number of ranks, way or type shows the same."""
    size, name = rank_and_size()[1], item.path.stem
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    way, dtype = params.get("way"), params.get("dtype", "float32")
    if name in TENSORFLOW:
        return not due_in_tensorflow(item, params)
    if name == "test_tensorflow_sessions":
        return "run" in params and not due(item, "run")  # with one thread or four
    if name == "test_jax_collectives":
        return params.get("wrap") in ("eager", "callback") and not due(item, "wrap", ("eager", "callback"))
    if name == "test_jax_order":
        return way in ("tokens", "callback")
    if name == "test_jax_transforms":
        return params.get("kind", "allreduce") not in ("allreduce", "alltoall")
    if size != 3:
        unusual = way in WAYS and (way != FAST_WAY.get(size) or dtype not in FAST_TYPES)
        return name == "test_collectives_stall" or unusual
    return way in OTHER_WAYS and (dtype not in FAST_TYPES or not due(item, "way", OTHER_WAYS))


def due(item: pytest.Item, name: str, values: Sequence[Any] = ()) -> bool:
    """Whether today a test has its turn with one of its parameters, whatever the others are.

    Args:
        item: The test with all its parameters.
        name: The parameter.
        values: Of which one is due on a day (default: both of two values).
    """
    assert isinstance(item, pytest.Function)
    value = item.callspec.params[name] if values else item.callspec.indices[name]
    return value in drawn(case_of(item, without=name), values or (0, 1), 1)


def due_in_tensorflow(item: pytest.Item, params: dict[str, Any]) -> bool:
    """Whether today a test of TensorFlow has its turn with its type, and at once or in a graph.

    dropin/contract tries each collective with all types each day, some tests at once and some in a graph.
    """
    assert isinstance(item, pytest.Function)
    types = ("bfloat16", *drawn(item.originalname, ("float16", "float32"), 1))
    return params.get("dtype", "bfloat16") in types and ("way" not in params or due(item, "way"))


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
