"""Inputs, tolerances and repeated checks for the contract's tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampled import part
from torch import Tensor

import horovod.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
ODD = RANK % 2 == 1

REDUCED = [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16]
WITH_GRADIENT = [torch.float32, torch.float64]
DIMS = (1, 2, 3)


def dims_of(dtype: torch.dtype) -> list[int]:
    """Return the numbers of dimensions to test with a type: one of them each day."""
    return part(f"dimensions of {dtype}", DIMS, 1)


def gpu(number: int | None = None) -> torch.device:
    """Return this rank's GPU, or skip the test if there is none."""
    if not torch.cuda.is_available():
        (pytest.fail if os.environ.get("RINGDANCE_TEST_GPU") == "1" else pytest.skip)("needs a GPU")
    place = hvd.local_rank() if number is None else number
    return torch.device("cuda", place % torch.cuda.device_count())


def draw(
    dtype: torch.dtype, dims: int, device: Any = "cpu", *, seed: int = 1234, most: int = 100, rows: int = 17
) -> Tensor:
    """Draw integers from -most to most - 1, 17 per dimension. Equal seeds give equal tensors."""
    made = torch.Generator().manual_seed(seed)
    shape = [rows, *[17] * (dims - 1)]
    return torch.randint(-most, most, shape, generator=made).to(dtype).to(device)


def ranks_of(process_set: Any = None) -> list[int]:
    return list(range(SIZE)) if process_set is None else process_set.ranks


def same(got: Tensor, want: Tensor) -> None:
    """Assert equal type, device, shape and values. Values are exact for integers, and on up to 3 ranks."""
    assert got.dtype is want.dtype
    assert got.device == want.device
    assert got.shape == want.shape
    if SIZE <= 3 or not want.dtype.is_floating_point:
        assert torch.equal(got, want)
    elif SIZE < 15:
        assert (got - want).abs().max() <= (1e-4 if SIZE < 10 else 5e-4) if want.numel() else True


def near(got: Tensor, want: Tensor) -> None:
    """Like ``same`` for results of rounded factors: integers exact, floats within a few last-place units."""
    assert got.dtype is want.dtype
    assert got.device == want.device
    if want.dtype.is_floating_point:
        torch.testing.assert_close(got, want, rtol=8 * torch.finfo(want.dtype).eps, atol=1e-6)
    else:
        assert torch.equal(got, want)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Scale a tensor in float64 (half precision in float32). Integers are truncated."""
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor.double()
    result = wide * factor
    return (result if tensor.dtype.is_floating_point else result.trunc()).to(tensor.dtype)


def same_gradient(tensor: Tensor, want: Tensor) -> None:
    assert tensor.grad is not None
    assert tensor.grad.shape == want.shape
    assert torch.linalg.norm((tensor.grad - want).double()) < 1e-8


def fails_everywhere(call: Callable[[], Any], *words: str) -> None:
    """Assert that a disagreement raises HorovodInternalError on all ranks, and that the job continues."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    for word in words:
        assert word in str(caught.value)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="goes on").tolist() == [SIZE] * 2


def refuses_duplicate(submit: Callable[[], int]) -> Any:
    """Assert ValueError, only on this rank, for a name in flight. Return the first call's result."""
    handle = submit() if RANK == 0 else -1
    if RANK == 0:
        for _ in range(3):
            with pytest.raises(ValueError, match="already in flight"):
                submit()
    hvd.barrier()
    if RANK != 0:
        handle = submit()
    return hvd.synchronize(handle)
