"""Contract, torch: reducescatter and grouped_reducescatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_inputs import (
    DIMS,
    ODD,
    RANK,
    REDUCED,
    SIZE,
    WITH_GRADIENT,
    dims_of,
    draw,
    fails_everywhere,
    near,
    refuses_duplicate,
    same,
    same_gradient,
    scaled,
    several,
)
from torch import Tensor

import horovod.torch as hvd

ROWS = (17, SIZE * 4, 1)  # one more for the first ranks, equal, and none for most


def own(tensor: Tensor, members: list[int] | None = None) -> Tensor:
    """Return this rank's rows: d // n out of d, and one more for the first d % n ranks."""
    members = list(range(SIZE)) if members is None else members
    share, rest = divmod(tensor.shape[0], len(members))
    place = members.index(RANK)
    start = place * share + min(place, rest)
    return tensor[start : start + share + (place < rest)]


def inputs(device: Any) -> list[Tensor]:
    return [
        draw(dtype, dims, device, rows=rows)
        for dtype in REDUCED for dims in dims_of(dtype) for rows in ROWS
    ]  # fmt: skip


def test_sum(device: Any) -> None:
    for tensor in inputs(device):
        same(hvd.reducescatter(tensor, op=hvd.Sum), own(tensor * SIZE))


def test_average(device: Any) -> None:
    for tensor in inputs(device):
        same(hvd.reducescatter(tensor, op=hvd.Average), own(tensor))
        same(hvd.reducescatter(tensor), own(tensor))


def test_prescale(device: Any) -> None:
    for tensor in inputs(device):
        result = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.3141)
        near(result, own(scaled(tensor, 0.3141) * SIZE))


def test_postscale(device: Any) -> None:
    for tensor in inputs(device):
        result = hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=0.3141)
        near(result, own(scaled(tensor * SIZE, 0.3141)))


@several
def test_no_dimension(device: Any) -> None:
    fails_everywhere(lambda: hvd.reducescatter(torch.tensor(1.0, device=device), op=hvd.Sum), "dimension")


def test_adasum() -> None:
    with pytest.raises(hvd.HorovodInternalError, match="Adasum"):
        hvd.reducescatter(torch.ones(17), op=hvd.Adasum)
    hvd.barrier()


def test_many_in_flight_are_fused(device: Any) -> None:
    tensors = inputs(device)
    handles = [hvd.reducescatter_async(tensor, op=hvd.Sum) for tensor in tensors]
    while not all([hvd.poll(handle) for handle in handles]):
        pass
    for tensor, handle in zip(tensors, handles, strict=True):
        same(hvd.synchronize(handle), own(tensor * SIZE))


@several
def test_shape_mismatch() -> None:
    fails_everywhere(lambda: hvd.reducescatter(torch.ones(17, 17 + RANK), name="scatter.shapes"), "shape")
    fails_everywhere(lambda: hvd.reducescatter(torch.ones(17 + RANK, 17), name="scatter.shapes"), "shape")
    shape = (17, 18) if ODD else (18, 17)
    fails_everywhere(lambda: hvd.reducescatter(torch.ones(shape), name="scatter.shapes"), "shape")


@several
def test_dtype_mismatch() -> None:
    dtype = torch.int32 if ODD else torch.float32
    fails_everywhere(lambda: hvd.reducescatter(torch.ones(17, dtype=dtype), name="scatter.types"), "type")


@several
def test_duplicate_name() -> None:
    tensor = draw(torch.float32, 2)
    result = refuses_duplicate(lambda: hvd.reducescatter_async(tensor, name="scatter.again", op=hvd.Sum))
    same(result, own(tensor * SIZE))


@several
def test_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    for tensor in inputs(device):
        result = hvd.reducescatter(tensor, op=hvd.Sum, process_set=mine)
        same(result, own(tensor * mine.size(), mine.ranks))


def gathered(members: list[int], tensor: Tensor, factor: float) -> Tensor:
    """Return the contract's gradient: each rank's incoming one (its number plus one) on its own rows."""
    want = torch.empty_like(tensor)
    share, rest = divmod(tensor.shape[0], len(members))
    start = 0
    for place, rank in enumerate(members):
        end = start + share + (place < rest)
        want[start:end] = (rank + 1.0) * factor
        start = end
    return want


def check_gradient(device: Any, op: int, members: list[int], factor: float, **others: Any) -> None:
    for dtype in WITH_GRADIENT:
        for dims in dims_of(dtype):
            tensor = draw(dtype, dims, device).requires_grad_()
            result = hvd.reducescatter(tensor, op=op, **others)
            result.backward(torch.full_like(result, RANK + 1.0))
            same_gradient(tensor, gathered(members, tensor.detach(), factor))


def test_gradient_of_sum_is_times_size(device: Any) -> None:
    check_gradient(device, hvd.Sum, list(range(SIZE)), SIZE)


def test_gradient_of_average(device: Any) -> None:
    check_gradient(device, hvd.Average, list(range(SIZE)), 1.0)


def test_gradient_with_scales(device: Any) -> None:
    scales = {"prescale_factor": 0.5, "postscale_factor": 4.0}
    check_gradient(device, hvd.Sum, list(range(SIZE)), SIZE * 2.0, **scales)


@several
def test_gradient_in_a_process_set(device: Any, halves: Any) -> None:
    mine, _ = halves
    check_gradient(device, hvd.Sum, mine.ranks, mine.size(), process_set=mine)


# Groups of five tensors.


def groups(device: Any) -> list[list[Tensor]]:
    return [
        [draw(dtype, dims, device, seed=1234 + number) for number in range(5)]
        for dtype in REDUCED for dims in dims_of(dtype)
    ]


def test_grouped_sum_and_average(device: Any) -> None:
    for group in groups(device):
        for op, factor in ((hvd.Sum, SIZE), (hvd.Average, 1)):
            handle = hvd.grouped_reducescatter_async(group, op=op)
            for results in (hvd.grouped_reducescatter(group, op=op), hvd.synchronize(handle)):
                assert len(results) == 5
                for result, tensor in zip(results, group, strict=True):
                    same(result, own(tensor * factor))


def test_grouped_scales(device: Any) -> None:
    for group in groups(device):
        before = hvd.grouped_reducescatter(group, op=hvd.Sum, prescale_factor=0.3141)
        after = hvd.grouped_reducescatter(group, op=hvd.Sum, postscale_factor=0.3141)
        for first, second, tensor in zip(before, after, group, strict=True):
            near(first, own(scaled(tensor, 0.3141) * SIZE))
            near(second, own(scaled(tensor * SIZE, 0.3141)))


@several
def test_grouped_no_dimension() -> None:
    group = [torch.tensor(float(number)) for number in range(5)]
    fails_everywhere(lambda: hvd.grouped_reducescatter(group, op=hvd.Sum), "dimension")


@several
def test_grouped_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    for group in groups(device):
        results = hvd.grouped_reducescatter(group, op=hvd.Sum, process_set=mine)
        for result, tensor in zip(results, group, strict=True):
            same(result, own(tensor * mine.size(), mine.ranks))


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_grouped_gradient(device: Any, op: str) -> None:
    factor = SIZE if op == "Sum" else 1.0
    for dtype in WITH_GRADIENT:
        group = [draw(dtype, dims, device).requires_grad_() for dims in DIMS]
        results = hvd.grouped_reducescatter(group, op=getattr(hvd, op))
        torch.autograd.backward(list(results), [torch.full_like(result, RANK + 1.0) for result in results])
        for tensor in group:
            same_gradient(tensor, gathered(list(range(SIZE)), tensor.detach(), factor))
