"""Let the rank tests import the helpers, and run the same tests again with other settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sampled import case_of, drawn
from this_rank import rank_and_size

# TensorFlow gets a single operation thread: even then nothing may hang. Its import messages are suppressed.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if os.environ.get("TEST_DEVICE", "cpu") != "cpu":  # set by benchmarks/gpu_check.py
    import torch

    torch.set_default_device(os.environ["TEST_DEVICE"])
if os.environ.get("TEST_NCCL") == "double":
    import nccl_double

    nccl_double.install()

TINY = {"RINGDANCE_CHUNK_BYTES": "4096", "RINGDANCE_SMALL_BYTES": "64"}
WAYS = {
    "window": {},
    "tiny": TINY,
    "messages": {"RINGDANCE_WINDOW": "0"},
    "tiny-messages": {"RINGDANCE_WINDOW": "0", **TINY},
}
# On 3 ranks, blocks are unequal and the order of summation matters, so make test runs every way there: each
# case with the window and with one other way, which changes daily. All types run with the window. Other ways
# run only the types whose arithmetic differs. dropin/contract covers all TensorFlow types.
FAST_WAY = {1: "window", 2: "window", 4: "tiny-messages"}
OTHER_WAYS = tuple(WAYS)[1:]
TENSORFLOW = tuple(f"test_tensorflow_{name}" for name in ("collectives", "gradients", "sparse", "tape"))
FAST_TYPES = ("bool", "uint8", "int64", "bfloat16", "float32")


def later(item: pytest.Item) -> bool:
    """Return True if make test skips a test, because another number of ranks, way or type covers it."""
    size, name = rank_and_size()[1], item.path.stem
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    way, dtype = params.get("way"), params.get("dtype", "float32")
    if name in TENSORFLOW:
        return not due_in_tensorflow(item, params)
    if name == "test_tensorflow_sessions":
        return "run" in params and not due(item, "run")  # daily, with one thread or with four
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
    """Return True if a test is due today with this value of one parameter, whatever its other parameters are.

    Args:
        item: Test with all its parameters.
        name: Name of the parameter.
        values: Values of which one is due each day. By default, either of two values.
    """
    assert isinstance(item, pytest.Function)
    value = item.callspec.params[name] if values else item.callspec.indices[name]
    return value in drawn(case_of(item, without=name), values or (0, 1), 1)


def due_in_tensorflow(item: pytest.Item, params: dict[str, Any]) -> bool:
    """Return True if a TensorFlow test is due today with its type, and in its mode (eager or graph).

    dropin/contract tests each collective with all types every day, some eagerly and some in a graph.
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
    """Select how bytes move: by shared memory or MPI messages, in chunks of the usual size or tiny ones."""
    from other_settings import other_settings

    with other_settings(WAYS[request.param]):
        yield request.param
