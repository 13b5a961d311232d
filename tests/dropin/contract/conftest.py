"""Run tests as Horovod's users run scripts: on real ranks, with the environment set completely before init().

A test that needs a GPU is skipped if there is none. With RINGDANCE_TEST_GPU=1 it fails instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
# One thread for TensorFlow's operations, and one within each: even then nothing may hang.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

sys.path.insert(0, str(Path(__file__).parent))  # makes `contract_inputs` importable

from sampled import case_of, drawn

ON_CPU = ("cpu-eager", "cpu-graph")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a TensorFlow test eagerly on one day and in a graph on the next. make test-all runs both."""
    for item in items:
        way = item.callspec.params.get("way") if hasattr(item, "callspec") else None
        if way in ON_CPU and way not in drawn(case_of(item, without="way"), ON_CPU, 1):
            item.add_marker(pytest.mark.slow)



@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    """Return the device for the tensors: host memory, or this rank's GPU."""
    import torch
    from contract_inputs import gpu

    return torch.device("cpu") if request.param == "cpu" else gpu()


@pytest.fixture(params=["cpu-eager", "cpu-graph", "cuda-eager", "cuda-graph"])
def way(request: pytest.FixtureRequest) -> Any:
    """Select how TensorFlow runs a function: eagerly or as a graph, on the CPU or on this rank's GPU."""
    from tensorflow_inputs import Way

    return Way(request.param)


@pytest.fixture(scope="module")
def halves() -> Iterator[Any]:
    """Yield process sets of the even and the odd ranks: (mine, the other)."""
    import ringdance.numpy as hvd

    hvd.init()
    if hvd.size() == 1:
        pytest.skip("needs two process sets")
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    odd = hvd.add_process_set(range(1, hvd.size(), 2))
    yield (even, odd) if even.included() else (odd, even)
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
