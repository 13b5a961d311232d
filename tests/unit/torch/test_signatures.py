"""Names, places and defaults of arguments that scripts written for Horovod rely on."""

from __future__ import annotations

import inspect

import pytest

import ringdance.torch as hvd

REDUCE = "tensor average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 process_set=global"
GROUP = REDUCE.replace("tensor", "tensors")
COMPRESSED = (
    "tensor average=None name=None compression=none op=None prescale_factor=1.0 postscale_factor=1.0 "
)
SCATTER = "name=None op=0 process_set=global prescale_factor=1.0 postscale_factor=1.0"
SCATTER_COMPRESSED = SCATTER.replace("op=0", "compression=none op=0")
SIGNATURES = {
    "allreduce": COMPRESSED + "process_set=global",
    "allreduce_async": REDUCE,
    "allreduce_": REDUCE,
    "allreduce_async_": REDUCE,
    "grouped_allreduce": COMPRESSED.replace("tensor", "tensors") + "process_set=global",
    "grouped_allreduce_async": GROUP,
    "grouped_allreduce_": GROUP,
    "grouped_allreduce_async_": GROUP,
    "sparse_allreduce_async": "tensor name op process_set=global",
    "allgather": "tensor name=None process_set=global",
    "allgather_async": "tensor name=None process_set=global",
    "grouped_allgather": "tensors name=None process_set=global",
    "grouped_allgather_async": "tensors name=None process_set=global",
    "broadcast": "tensor root_rank name=None process_set=global",
    "broadcast_async": "tensor root_rank name=None process_set=global",
    "broadcast_": "tensor root_rank name=None process_set=global",
    "broadcast_async_": "tensor root_rank name=None process_set=global",
    "alltoall": "tensor splits=None name=None process_set=global",
    "alltoall_async": "tensor splits=None name=None process_set=global",
    "reducescatter": f"tensor {SCATTER_COMPRESSED}",
    "reducescatter_async": f"tensor {SCATTER}",
    "grouped_reducescatter": f"tensors {SCATTER_COMPRESSED}",
    "grouped_reducescatter_async": f"tensors {SCATTER}",
    "join": "device=-1",
    "barrier": "process_set=global",
    "poll": "handle",
    "synchronize": "handle",
    "DistributedOptimizer": (
        "optimizer named_parameters=None compression=none backward_passes_per_step=1 op=0 "
        "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set=global"
    ),
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": "obj root_rank=0 name=None process_set=global",
    "allgather_object": "obj name=None process_set=global",
    "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True",
    "init": "comm=None process_sets=None",
}
SPECIAL = {id(hvd.global_process_set): "global", id(hvd.Compression.none): "none"}


def written(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={SPECIAL.get(id(parameter.default), repr(parameter.default))}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    found = [
        written(parameter)
        for parameter in inspect.signature(getattr(hvd, name)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    # After Horovod's arguments, others may follow.
    expected = SIGNATURES[name].split()
    assert found[: len(expected)] == expected


def test_constants() -> None:
    numbers = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert all(type(number) is int for number in numbers)


def test_built_before_init() -> None:
    assert hvd.mpi_built() is True
    assert hvd.gloo_built() is False
    assert not any([hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()])
    assert hvd.nccl_built() < 21000
