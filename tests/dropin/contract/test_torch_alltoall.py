"""Contract, torch: alltoall."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_inputs import (
    DIMS,
    MOVED,
    ODD,
    RANK,
    SIZE,
    WITH_GRADIENT,
    dims_of,
    fails_everywhere,
    same,
    several,
)
from contract_inputs import same_gradient as same_gradient_of
from torch import Tensor

import horovod.torch as hvd


def rows(numbers: list[int], dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Return one row for each number, filled with it."""
    column = torch.tensor(numbers, dtype=dtype, device=device)
    return column.reshape(-1, *[1] * (dims - 1)).repeat(1, *[17] * (dims - 1))


def sent(rank: int, members: list[int], dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Return rank r's rows, r + 1 for each receiver, filled with 10 r + the receiver's number."""
    numbers = [10 * rank + receiver for receiver in members for _ in range(rank + 1)]
    return rows(numbers, dims, dtype, device)


def received(members: list[int], dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    numbers = [10 * sender + RANK for sender in members for _ in range(sender + 1)]
    return rows(numbers, dims, dtype, device)


def check(device: Any, members: list[int], splits_on: Any, **chosen: Any) -> None:
    splits = torch.full((len(members),), RANK + 1, dtype=torch.int32, device=splits_on)
    for dtype in MOVED:
        for dims in dims_of(dtype):
            tensor = sent(RANK, members, dims, dtype, device)
            output, counts = hvd.alltoall(tensor, splits, **chosen)
            same(output, received(members, dims, dtype, device))
            assert counts.dtype is torch.int32
            assert counts.device == splits.device
            assert counts.tolist() == [sender + 1 for sender in members]
            output, counts = hvd.synchronize(hvd.alltoall_async(tensor, [RANK + 1] * len(members), **chosen))
            same(output, received(members, dims, dtype, device))


def test_splits(device: Any) -> None:
    check(device, list(range(SIZE)), "cpu")


def test_splits_on_a_gpu() -> None:
    from contract_inputs import gpu

    check(gpu(), list(range(SIZE)), gpu())


@several
def test_process_sets(device: Any, halves: Any) -> None:
    check(device, halves[0].ranks, "cpu", process_set=halves[0])


def test_equal_split(device: Any) -> None:
    for dtype in MOVED:
        for dims in dims_of(dtype):
            inputs = [10 * RANK + receiver for receiver in range(SIZE) for _ in range(3)]
            want = [10 * sender + RANK for sender in range(SIZE) for _ in range(3)]
            output = hvd.alltoall(rows(inputs, dims, dtype, device))
            same(output, rows(want, dims, dtype, device))
            both = hvd.synchronize(hvd.alltoall_async(rows(inputs, dims, dtype, device)))
            same(both[0], output)
            assert both[1].tolist() == [3] * SIZE


@several
def test_dtype_mismatch() -> None:
    dtype = torch.int32 if ODD else torch.float32
    fails_everywhere(lambda: hvd.alltoall(torch.ones(SIZE, dtype=dtype), name="alltoall.types"), "type")


@several
def test_dims_mismatch() -> None:
    fails_everywhere(lambda: hvd.alltoall(torch.ones(SIZE, 17 + RANK), name="alltoall.dims"), "shape")
    shape = (SIZE, 17) if ODD else (SIZE, 17, 1)
    fails_everywhere(lambda: hvd.alltoall(torch.ones(shape), name="alltoall.dims"), "shape")


@several
def test_rows_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="rows evenly among"):
        hvd.alltoall(torch.ones(SIZE + 1), name="alltoall.length")
    hvd.barrier()


def test_wrong_number_of_splits() -> None:
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.ones(SIZE + 1), [1] * (SIZE + 1), name="alltoall.number")
    hvd.barrier()


def test_splits_beyond_the_rows() -> None:
    with pytest.raises(ValueError, match="sum"):
        hvd.alltoall(torch.ones(SIZE - 1), torch.ones(SIZE, dtype=torch.int32), name="alltoall.sum")
    hvd.barrier()


def test_splits_of_another_type() -> None:
    for dtype in (torch.int64, torch.float32):
        with pytest.raises(ValueError, match="int32"):
            hvd.alltoall(torch.ones(SIZE), torch.ones(SIZE, dtype=dtype), name="alltoall.kind")
    hvd.barrier()


def check_gradient(device: Any, members: list[int], **chosen: Any) -> None:
    """Check that rows get the gradient of the rank they were sent to, here its number plus one."""
    for dtype in WITH_GRADIENT:
        for dims in dims_of(dtype):
            tensor = sent(RANK, members, dims, dtype, device).requires_grad_()
            output, _ = hvd.alltoall(tensor, [RANK + 1] * len(members), **chosen)
            output.backward(torch.full_like(output, RANK + 1.0))
            want = [receiver + 1 for receiver in members for _ in range(RANK + 1)]
            same_gradient_of(tensor, rows(want, dims, dtype, device))


def test_gradient(device: Any) -> None:
    check_gradient(device, list(range(SIZE)))


@several
def test_gradient_in_a_process_set(device: Any, halves: Any) -> None:
    check_gradient(device, halves[0].ranks, process_set=halves[0])


def test_gradient_of_an_equal_split(device: Any) -> None:
    for dims in DIMS:
        inputs = [receiver for receiver in range(SIZE) for _ in range(2)]
        tensor = rows(inputs, dims, torch.float64, device).requires_grad_()
        output = hvd.alltoall(tensor)
        output.backward(torch.full_like(output, RANK + 1.0))
        same_gradient_of(tensor, rows([receiver + 1 for receiver in inputs], dims, torch.float64, device))
