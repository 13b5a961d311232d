"""Contract, torch: broadcast of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_inputs import (
    MOVED,
    ODD,
    RANK,
    SIZE,
    WITH_GRADIENT,
    dims_of,
    fails_everywhere,
    refuses_duplicate,
    same,
    same_gradient,
    several,
)
from torch import Tensor

import horovod.torch as hvd


def of_rank(rank: int, dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.full([17] * dims, rank + 1, dtype=dtype, device=device)


def test_every_root(device: Any) -> None:
    for dtype in MOVED:
        for dims in dims_of(dtype):
            for root in range(SIZE):
                mine = of_rank(RANK, dims, dtype, device)
                result = hvd.broadcast(mine, root)
                same(result, of_rank(root, dims, dtype, device))
                assert result.data_ptr() != mine.data_ptr()
                same(mine, of_rank(RANK, dims, dtype, device))


def test_in_place(device: Any) -> None:
    for dtype in MOVED:
        for dims in dims_of(dtype):
            for root in range(SIZE):
                mine = of_rank(RANK, dims, dtype, device)
                assert hvd.broadcast_(mine, root) is mine
                same(mine, of_rank(root, dims, dtype, device))
                again = of_rank(RANK, dims, dtype, device)
                assert hvd.synchronize(hvd.broadcast_async_(again, root)) is again
                same(again, of_rank(root, dims, dtype, device))


@several
def test_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    for dtype in MOVED:
        for dims in dims_of(dtype):
            for root in mine.ranks:
                result = hvd.broadcast(of_rank(RANK, dims, dtype, device), root, process_set=mine)
                same(result, of_rank(root, dims, dtype, device))


@several
def test_shape_mismatch() -> None:
    fails_everywhere(lambda: hvd.broadcast(torch.ones(17, 10 + RANK), 0, name="broadcast.shapes"), "shape")


@several
def test_dtype_mismatch() -> None:
    dtype = torch.int32 if ODD else torch.float32
    fails_everywhere(lambda: hvd.broadcast(torch.ones(17, dtype=dtype), 0, name="broadcast.types"), "type")


@several
def test_root_mismatch() -> None:
    fails_everywhere(lambda: hvd.broadcast(torch.ones(17), RANK, name="broadcast.roots"), "root")


@several
def test_root_outside_the_process_set(halves: Any) -> None:
    mine, other = halves
    with pytest.raises(ValueError, match="root"):
        hvd.broadcast(torch.ones(17), other.ranks[0], process_set=mine)


@several
def test_duplicate_name() -> None:
    mine = torch.full((17,), RANK + 5)
    result = refuses_duplicate(lambda: hvd.broadcast_async(mine, 1, name="broadcast.again"))
    assert result.tolist() == [6] * 17


def check_gradient(device: Any, members: list[int], **chosen: Any) -> None:
    """Check the gradient: the mean of all ranks' gradients on the root, zero on others. For ones: one."""
    for dtype in WITH_GRADIENT:
        for dims in dims_of(dtype):
            for root in members:
                for value, mean in ((1.0, 1.0), (RANK + 1.0, sum(r + 1.0 for r in members) / len(members))):
                    tensor = of_rank(RANK, dims, dtype, device).requires_grad_()
                    result = hvd.broadcast(tensor, root, **chosen)
                    result.backward(torch.full_like(result, value))
                    same_gradient(tensor, torch.full_like(tensor, mean if root == RANK else 0.0))


def test_gradient(device: Any) -> None:
    check_gradient(device, list(range(SIZE)))


@several
def test_gradient_in_a_process_set(device: Any, halves: Any) -> None:
    check_gradient(device, halves[0].ranks, process_set=halves[0])
