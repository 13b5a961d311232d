"""Contract, torch: allgather and grouped_allgather."""

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
    refuses_duplicate,
    same,
    same_gradient,
    several,
)
from torch import Tensor

import horovod.torch as hvd

ROWS = [17, 32, 81, 12, 15, 23, 22] * 5  # for ranks 0 to 34


def block(rank: int, rows: int, dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a rank's input, filled with its number."""
    return torch.full((rows, *[17] * (dims - 1)), rank, dtype=dtype, device=device)


def equal(rank: int, dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    return block(rank, 17, dims, dtype, device)


def uneven(rank: int, dims: int, dtype: torch.dtype, device: Any) -> Tensor:
    return block(rank, ROWS[rank], dims, dtype, device)


@pytest.mark.parametrize("part", [equal, uneven])
def test_rows_of_all_ranks_in_order(device: Any, part: Any) -> None:
    for dtype in MOVED:
        for dims in dims_of(dtype):
            want = torch.cat([part(rank, dims, dtype, device) for rank in range(SIZE)])
            same(hvd.allgather(part(RANK, dims, dtype, device)), want)


def test_many_in_flight_are_fused(device: Any) -> None:
    kinds = [(dims, dtype, device) for dtype in MOVED for dims in dims_of(dtype)]
    handles = [hvd.allgather_async(uneven(RANK, *kind)) for kind in kinds]
    while not all([hvd.poll(handle) for handle in handles]):
        pass
    for kind, handle in zip(kinds, handles, strict=True):
        same(hvd.synchronize(handle), torch.cat([uneven(rank, *kind) for rank in range(SIZE)]))


@several
def test_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    for dtype in MOVED:
        for dims in dims_of(dtype):
            want = torch.cat([uneven(rank, dims, dtype, device) for rank in mine.ranks])
            same(hvd.allgather(uneven(RANK, dims, dtype, device), process_set=mine), want)


@several
def test_shape_mismatch() -> None:
    fails_everywhere(lambda: hvd.allgather(torch.ones(17, 10 + RANK, 17), name="allgather.shapes"), "shape")
    shape = (17, 17) if ODD else (17, 17, 17)
    fails_everywhere(lambda: hvd.allgather(torch.ones(shape), name="allgather.shapes"), "shape")


@several
def test_dtype_mismatch() -> None:
    dtype = torch.int32 if ODD else torch.float32
    fails_everywhere(lambda: hvd.allgather(torch.ones(17, dtype=dtype), name="allgather.types"), "type")


@several
def test_duplicate_name() -> None:
    mine = block(RANK, 2, 1, torch.float32, "cpu")
    result = refuses_duplicate(lambda: hvd.allgather_async(mine, name="allgather.again"))
    assert result.tolist() == [float(rank) for rank in range(SIZE) for _ in range(2)]


def weights(like: Tensor) -> Tensor:
    """Return a gradient for the gathered tensor that differs between rows and ranks."""
    rows = torch.arange(like.shape[0], dtype=like.dtype, device=like.device)
    return rows.reshape(-1, *[1] * (like.dim() - 1)).expand_as(like) * (2 * RANK + 1)


def own_rows(members: list[int], tensor: Tensor) -> Tensor:
    """Return the contract's gradient: this rank's rows of the mean of all ranks' weights."""
    before = sum(ROWS[rank] for rank in members if rank < RANK)
    rows = torch.arange(before, before + ROWS[RANK], dtype=tensor.dtype, device=tensor.device)
    mean = sum(2 * rank + 1 for rank in members) / len(members)
    return rows.reshape(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor) * mean


def test_gradient(device: Any) -> None:
    for dtype in WITH_GRADIENT:
        for dims in dims_of(dtype):
            tensor = uneven(RANK, dims, dtype, device).requires_grad_()
            result = hvd.allgather(tensor)
            result.backward(weights(result))
            same_gradient(tensor, own_rows(list(range(SIZE)), tensor))


@several
def test_gradient_in_a_process_set(device: Any, halves: Any) -> None:
    mine, _ = halves
    for dims in DIMS:
        tensor = uneven(RANK, dims, torch.float64, device).requires_grad_()
        result = hvd.allgather(tensor, process_set=mine)
        result.backward(weights(result))
        same_gradient(tensor, own_rows(mine.ranks, tensor))


def test_grouped(device: Any) -> None:
    for dtype in MOVED:
        for dims in dims_of(dtype):
            group = [uneven(RANK, dims, dtype, device) + number for number in range(5)]
            every = torch.cat([uneven(rank, dims, dtype, device) for rank in range(SIZE)])
            handle = hvd.grouped_allgather_async(group)
            for results in (hvd.grouped_allgather(group), hvd.synchronize(handle)):
                assert len(results) == 5
                for number, result in enumerate(results):
                    same(result, every + number)


@several
def test_grouped_process_sets(device: Any, halves: Any) -> None:
    mine, _ = halves
    group = [uneven(RANK, dims, torch.float32, device) for dims in DIMS]
    for dims, result in zip(DIMS, hvd.grouped_allgather(group, process_set=mine), strict=True):
        same(result, torch.cat([uneven(rank, dims, torch.float32, device) for rank in mine.ranks]))


def test_grouped_gradient(device: Any) -> None:
    for dtype in WITH_GRADIENT:
        group = [uneven(RANK, dims, dtype, device).requires_grad_() for dims in DIMS]
        results = hvd.grouped_allgather(group)
        torch.autograd.backward(list(results), [weights(result) for result in results])
        for tensor in group:
            same_gradient(tensor, own_rows(list(range(SIZE)), tensor))
