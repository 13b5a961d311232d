"""Contract, torch: allreduce and grouped_allreduce."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_inputs import (
    ODD,
    RANK,
    REDUCED,
    SIZE,
    WITH_GRADIENT,
    dims_of,
    draw,
    fails_everywhere,
    gpu,
    near,
    ranks_of,
    refuses_duplicate,
    same,
    same_gradient,
    scaled,
    several,
)
from torch import Tensor

import horovod.torch as hvd

Single = Callable[..., Tensor]


def all_kinds(device: Any, **others: Any) -> list[Tensor]:
    return [draw(dtype, dims, device, **others) for dtype in REDUCED for dims in dims_of(dtype)]


def test_sum(device: Any) -> None:
    for tensor in all_kinds(device):
        same(hvd.allreduce(tensor, average=False), tensor * SIZE)
        same(hvd.allreduce(tensor, op=hvd.Sum), tensor * SIZE)
        same(tensor, draw(tensor.dtype, tensor.dim(), device))


def test_average(device: Any) -> None:
    for tensor in all_kinds(device):
        same(hvd.allreduce(tensor, average=True), tensor)
        same(hvd.allreduce(tensor, op=hvd.Average), tensor)


def test_average_of_integers_is_cut_off(device: Any) -> None:
    for dtype in (torch.int32, torch.int64):
        inputs = [7 * rank - 12 for rank in range(SIZE)]
        result = hvd.allreduce(torch.full((17,), inputs[RANK], dtype=dtype, device=device))
        same(result, torch.full((17,), int(sum(inputs) / SIZE), dtype=dtype, device=device))


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_min_max_product(device: Any, op: str) -> None:
    join = {"Min": torch.minimum, "Max": torch.maximum, "Product": torch.mul}[op]
    for dtype in REDUCED:
        for dims in dims_of(dtype):
            every = [draw(dtype, dims, device, seed=1234 + rank, most=10) for rank in range(SIZE)]
            same(hvd.allreduce(every[RANK], op=getattr(hvd, op)), functools.reduce(join, every))


def test_in_place(device: Any) -> None:
    for tensor in all_kinds(device):
        want = tensor * SIZE
        array = tensor.clone()
        assert hvd.allreduce_(array, op=hvd.Sum) is array
        same(array, want)
        average = tensor.clone()
        assert hvd.synchronize(hvd.allreduce_async_(average, op=hvd.Average)) is average
        same(average, tensor)


def test_many_in_flight_are_fused(device: Any) -> None:
    tensors = all_kinds(device)
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in tensors]
    while not all([hvd.poll(handle) for handle in handles]):
        pass
    for tensor, handle in zip(tensors, handles, strict=True):
        same(hvd.synchronize(handle), tensor * SIZE)


def test_each_call_on_another_gpu() -> None:
    for step, dtype in enumerate(REDUCED):
        tensor = draw(dtype, 2, gpu(2 * hvd.local_rank() + (step + RANK) % 2))
        same(hvd.allreduce(tensor, op=hvd.Sum), tensor * SIZE)


def test_prescale(device: Any) -> None:
    for tensor in all_kinds(device):
        result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3141)
        near(result, scaled(tensor, 0.3141) * SIZE)


def test_postscale(device: Any) -> None:
    for tensor in all_kinds(device):
        result = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=0.3141)
        near(result, scaled(tensor * SIZE, 0.3141))


@several
def test_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    for dtype in REDUCED:
        for dims in dims_of(dtype):
            tensor = draw(dtype, dims, device) if ODD else draw(dtype, dims, device, seed=99)
            same(hvd.allreduce(tensor, op=hvd.Sum, process_set=mine), tensor * mine.size())
            same(hvd.allreduce(tensor, process_set=mine), tensor)


@several
def test_foreign_process_set(halves: Any) -> None:
    with pytest.raises(ValueError, match="not a member"):
        hvd.allreduce(torch.ones(3), process_set=halves[1])


@several
def test_shape_mismatch() -> None:
    fails_everywhere(lambda: hvd.allreduce(torch.ones(17 + RANK, 17), name="allreduce.shapes"), "shape")


@several
def test_dims_mismatch() -> None:
    shape = (17, 18) if ODD else (18, 17)
    fails_everywhere(lambda: hvd.allreduce(torch.ones(shape), name="allreduce.dims"), "shape")
    fails_everywhere(lambda: hvd.allreduce(torch.ones(306 if ODD else shape), name="allreduce.dims"), "shape")


@several
def test_dtype_mismatch() -> None:
    dtype = torch.int32 if ODD else torch.float32
    fails_everywhere(lambda: hvd.allreduce(torch.ones(17, dtype=dtype), name="allreduce.types"), "type")


@several
def test_cpu_and_gpu_mismatch() -> None:
    card = gpu()  # without a GPU, the test ends here on all ranks
    where = card if ODD else "cpu"
    with pytest.raises(hvd.HorovodInternalError, match="device"):
        hvd.allreduce(torch.ones(17, device=where), name="allreduce.devices", op=hvd.Sum)
    hvd.barrier()


@several
def test_duplicate_name() -> None:
    result = refuses_duplicate(lambda: hvd.allreduce_async(torch.ones(17), name="allreduce.again"))
    assert result.tolist() == [1.0] * 17


def leaves(device: Any) -> list[Tensor]:
    return [draw(dtype, dims, device).requires_grad_() for dtype in WITH_GRADIENT for dims in dims_of(dtype)]


def incoming(like: Tensor) -> Tensor:
    return torch.full_like(like, RANK + 1.0)


def test_gradient_of_sum(device: Any) -> None:
    for tensor in leaves(device):
        result = hvd.allreduce(tensor, op=hvd.Sum)
        result.backward(incoming(result))
        same_gradient(tensor, torch.full_like(tensor, SIZE * (SIZE + 1) / 2))


def test_gradient_of_average(device: Any) -> None:
    for tensor in leaves(device):
        result = hvd.allreduce(tensor, op=hvd.Average)
        result.backward(incoming(result))
        same_gradient(tensor, torch.full_like(tensor, (SIZE + 1) / 2))


@several
def test_gradient_in_a_process_set(device: Any, halves: Any) -> None:
    mine, _ = halves
    for tensor in leaves(device):
        result = hvd.allreduce(tensor, op=hvd.Sum, process_set=mine)
        result.backward(incoming(result))
        same_gradient(tensor, torch.full_like(tensor, sum(rank + 1.0 for rank in mine.ranks)))


# Groups of five tensors.


def groups(device: Any) -> list[list[Tensor]]:
    return [
        [draw(dtype, dims, device, seed=1234 + number) for number in range(5)]
        for dtype in REDUCED for dims in dims_of(dtype)
    ]


def all_same(got: Any, want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for actual, other in zip(got, want, strict=True):
        same(actual, other)


def test_grouped_sum(device: Any) -> None:
    for group in groups(device):
        want = [tensor * SIZE for tensor in group]
        all_same(hvd.grouped_allreduce(group, op=hvd.Sum), want)
        all_same(hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum)), want)


def test_grouped_average(device: Any) -> None:
    for group in groups(device):
        all_same(hvd.grouped_allreduce(group, average=True), group)
        all_same(hvd.grouped_allreduce(group, op=hvd.Average), group)


def test_grouped_in_place(device: Any) -> None:
    for group in groups(device):
        want = [tensor * SIZE for tensor in group]
        inputs = [tensor.clone() for tensor in group]
        hvd.grouped_allreduce_(inputs, op=hvd.Sum)
        all_same(inputs, want)
        inputs = [tensor.clone() for tensor in group]
        result = hvd.synchronize(hvd.grouped_allreduce_async_(inputs, op=hvd.Sum))
        assert all(actual is other for actual, other in zip(result, inputs, strict=True))
        all_same(inputs, want)


@several
def test_grouped_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    for group in groups(device):
        result = hvd.grouped_allreduce(group, op=hvd.Sum, process_set=mine)
        all_same(result, [tensor * mine.size() for tensor in group])


def test_grouped_cpu_and_gpu_mix() -> None:
    mixed = [torch.ones(17, device=gpu() if number % 2 else "cpu") for number in range(5)]
    with pytest.raises(hvd.HorovodInternalError, match="CPU"):
        hvd.grouped_allreduce(mixed)
    hvd.barrier()


def check_grouped_gradient(device: Any, op: int, process_set: Any, want: float) -> None:
    chosen = {} if process_set is None else {"process_set": process_set}
    for dtype in WITH_GRADIENT:
        group = [draw(dtype, 2, device, seed=1234 + number).requires_grad_() for number in range(5)]
        results = hvd.grouped_allreduce(group, op=op, **chosen)
        torch.autograd.backward(list(results), [incoming(result) for result in results])
        for tensor in group:
            same_gradient(tensor, torch.full_like(tensor, want))


def test_grouped_gradient_of_sum(device: Any) -> None:
    check_grouped_gradient(device, hvd.Sum, None, sum(rank + 1.0 for rank in ranks_of()))


def test_grouped_gradient_of_average(device: Any) -> None:
    check_grouped_gradient(device, hvd.Average, None, (SIZE + 1) / 2)


@several
def test_grouped_gradient_in_a_process_set(device: Any, halves: Any) -> None:
    mine, _ = halves
    check_grouped_gradient(device, hvd.Sum, mine, sum(rank + 1.0 for rank in mine.ranks))
