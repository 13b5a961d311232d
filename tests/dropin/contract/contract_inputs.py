"""Inputs, tolerances and repeated checks of the contract's tests."""

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
    """Return the numbers of dimensions to try with a type: of a day, one of them."""
    return part(f"dimensions of {dtype}", DIMS, 1)


def gpu(number: int | None = None) -> torch.device:
    """This rank's GPU; ends the test where there is none."""
    if not torch.cuda.is_available():
        (pytest.fail if os.environ.get("RINGDANCE_TEST_GPU") == "1" else pytest.skip)("needs a GPU")
    place = hvd.local_rank() if number is None else number
    return torch.device("cuda", place % torch.cuda.device_count())


def draw(
    dtype: torch.dtype, dims: int, device: Any = "cpu", *, seed: int = 1234, most: int = 100, rows: int = 17
) -> Tensor:
    """Whole numbers from -most to most - 1, 17 for each dimension; equal seeds give equal tensors."""
    made = torch.Generator().manual_seed(seed)
    shape = [rows, *[17] * (dims - 1)]
    return torch.randint(-most, most, shape, generator=made).to(dtype).to(device)


def ranks_of(process_set: Any = None) -> list[int]:
    return list(range(SIZE)) if process_set is None else process_set.ranks


def same(got: Tensor, want: Tensor) -> None:
    """Equal in type, place and shape; in values exactly up to 3 ranks and for integers."""
    assert got.dtype is want.dtype
    assert got.device == want.device
    assert got.shape == want.shape
    if SIZE <= 3 or not want.dtype.is_floating_point:
        assert torch.equal(got, want)
    elif SIZE < 15:
        assert (got - want).abs().max() <= (1e-4 if SIZE < 10 else 5e-4) if want.numel() else True


def near(got: Tensor, want: Tensor) -> None:
    """As ``same`` where factors are rounded: integers exactly, others to some units in the last place."""
    assert got.dtype is want.dtype
    assert got.device == want.device
    if want.dtype.is_floating_point:
        torch.testing.assert_close(got, want, rtol=8 * torch.finfo(want.dtype).eps, atol=1e-6)
    else:
        assert torch.equal(got, want)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """What a factor makes of a tensor: in float64 (half precision in float32), integers cut off."""
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor.double()
    result = wide * factor
    return (result if tensor.dtype.is_floating_point else result.trunc()).to(tensor.dtype)


def same_gradient(tensor: Tensor, want: Tensor) -> None:
    assert tensor.grad is not None
    assert tensor.grad.shape == want.shape
    assert torch.linalg.norm((tensor.grad - want).double()) < 1e-8


def fails_everywhere(call: Callable[[], Any], *words: str) -> None:
    """Ranks disagree: HorovodInternalError (a RuntimeError) on all of them, and the job goes on."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    for word in words:
        assert word in str(caught.value)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="goes on").tolist() == [SIZE] * 2


def refuses_duplicate(submit: Callable[[], int]) -> Any:
    """A name that is in flight here: ValueError here alone. Returns what the first call gave."""
    handle = submit() if RANK == 0 else -1
    if RANK == 0:
        for _ in range(3):
            with pytest.raises(ValueError, match="already in flight"):
                submit()
    hvd.barrier()
    if RANK != 0:
        handle = submit()
    return hvd.synchronize(handle)
