"""NVIDIA's packages have the names that ``Nccl`` uses, and tensors are described as they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest

from ringdance.core.exchange.nccl import buffers_at, exchanges
from ringdance.core.request import Collective, ReduceOp
from ringdance.core.transport.nccl import TYPES, Nccl


def test_the_packages_have_the_names() -> None:
    bindings = pytest.importorskip("nccl.bindings.nccl")
    nccl = Nccl()
    assert {nccl._type(dtype) for dtype in TYPES} == set(range(10))
    assert nccl._operation(average=True) == int(bindings.RedOp.Avg)
    names = (
        "get_unique_id", "comm_init_rank_scalable", "comm_get_async_error", "comm_destroy", "comm_abort",
        "group_start", "group_end", "all_reduce", "reduce_scatter", "broadcast", "all_gather", "send", "recv",
    )  # fmt: skip
    assert [name for name in names if not hasattr(bindings, name)] == []
    core = pytest.importorskip("cuda.core")
    members = {
        core.Device: ("set_current", "create_stream", "allocate", "device_id", "uuid", "get_all_devices"),
        core.Stream: ("from_handle", "record", "wait", "sync", "handle"), core.Event: ("is_done",),
        core.Buffer: ("fill", "handle", "size"),
    }  # fmt: skip
    assert [name for kind, known in members.items() for name in known if not hasattr(kind, name)] == []


def test_without_a_gpu_there_is_no_nccl() -> None:
    assert Nccl().version == 0


def test_buffers_of_one_dtype_are_adjacent() -> None:
    float32, float16 = np.dtype("float32"), np.dtype("float16")
    shapes = [(2, 3), (4,), (5,), ()]
    buffers = buffers_at([1000, 5000], shapes, [float32, float32, float16, float32])
    places = [(buffer.address, buffer.nbytes) for buffer in buffers]
    assert places == [(1000, 24), (1024, 16), (5000, 10), (1040, 4)]
    assert [buffer.ndim for buffer in buffers] == [2, 1, 1, 0]


@pytest.mark.parametrize(("dtype", "operation", "scales", "expected"), [
    ("float32", ReduceOp.AVERAGE, (2.0, 1.0), True), ("bfloat16", ReduceOp.SUM, (1.0, 1.0), True),
    ("float32", ReduceOp.MAX, (1.0, 1.0), False), ("int32", ReduceOp.SUM, (1.0, 1.0), True),
    ("int32", ReduceOp.SUM, (2.0, 1.0), False), ("int32", ReduceOp.AVERAGE, (1.0, 1.0), False),
    ("int16", ReduceOp.SUM, (1.0, 1.0), False), ("bool", ReduceOp.SUM, (1.0, 1.0), False),
])  # fmt: skip
def test_reductions_that_nccl_does_as_the_engine_does(
    dtype: str, operation: ReduceOp, scales: tuple[float, float], expected: bool
) -> None:
    assert exchanges(Collective.ALLREDUCE, operation, scales, dtype) is expected
    assert exchanges(Collective.BROADCAST, operation, scales, dtype)
