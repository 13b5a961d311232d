"""Complex tensors, reduced by the engine and by gloo (as GPU tensors are): conjugate views and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from other_settings import other_settings

import ringdance.torch as hvd
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(scope="module", autouse=True, params=["mpi", "gloo"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with other_settings({"RINGDANCE_CPU_OPERATIONS": request.param, "RINGDANCE_OVERLAP": "on"}):
        yield


def mine(rank: int = RANK, rows: int = 5, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    made = torch.Generator("cpu").manual_seed(rank + 1)
    return torch.randn(rows, 3, dtype=dtype, generator=made, device="cpu").to(torch.empty(0).device)


def everyone(**options: Any) -> list[torch.Tensor]:
    return [mine(rank, **options) for rank in range(SIZE)]


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.resolve_conj().resolve_neg(), wanted.resolve_conj().resolve_neg())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_collectives(dtype: torch.dtype) -> None:
    inputs, every = mine(dtype=dtype), everyone(dtype=dtype)
    total: Any = sum(every)
    near(hvd.allreduce(inputs), total / SIZE)
    near(hvd.allreduce(inputs, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 1.5 * total)
    near(hvd.synchronize(hvd.allreduce_async(inputs, op=hvd.Sum)), total)
    mixed = hvd.grouped_allreduce([inputs, torch.ones(2), inputs.sum(), inputs[:0]], op=hvd.Sum)
    sums = [total, torch.full((2,), float(SIZE)), total.sum(), total[:0]]
    for item, wanted in zip(mixed, sums, strict=True):
        near(item, wanted)
    near(hvd.allreduce_(inputs.clone(), op=hvd.Sum), total)
    near(hvd.allgather(inputs[: RANK + 1]), torch.cat([item[: rank + 1] for rank, item in enumerate(every)]))
    near(hvd.broadcast(inputs, 1), every[1])
    parts = [tensor[RANK : RANK + 1] for tensor in every]
    near(hvd.alltoall(inputs, splits=[1] * SIZE)[0], torch.cat(parts))
    near(hvd.reducescatter(inputs), torch.tensor_split(total / SIZE, SIZE)[RANK])
    near(hvd.reducescatter(inputs[:, 0], op=hvd.Sum), torch.tensor_split(total[:, 0], SIZE)[RANK])
    near(hvd.broadcast_object(inputs, 0), every[0])
    sparse = torch.sparse_coo_tensor([[RANK, 2]], inputs[:2], (5, 3), check_invariants=False)
    dense = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
    near(dense, hvd.allreduce(sparse.to_dense(), op=hvd.Sum))


def test_views_that_conjugate_negate_or_stride() -> None:
    for view in (torch.conj, torch.t, torch.imag, torch._neg_view, lambda one: one.conj().imag):
        near(hvd.allreduce(view(mine()), op=hvd.Sum), view(sum(everyone())))
        near(hvd.grouped_allreduce([view(mine())])[0], view(sum(everyone())) / SIZE)
        state = {"weight": view(mine())}
        hvd.broadcast_parameters(state, 0)
        near(state["weight"], view(mine(0)))
    for view in (torch.conj, torch._neg_view):
        with pytest.raises(ValueError, match="conjugated or negated"):
            hvd.allreduce_(view(mine()))
        with pytest.raises(ValueError, match="conjugated or negated"):
            hvd.broadcast_(view(mine()), 0)


def test_what_is_refused() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(NotImplementedError, match=r"Complex tensors .* Sum and Average, not"):
            hvd.allreduce(mine(), op=op)
    for call in (hvd.allreduce, hvd.allgather):
        with pytest.raises(ValueError, match="complex32"):
            call(mine().to(torch.complex32))


def test_gradients_of_collectives() -> None:
    inputs, total = mine().requires_grad_(), sum(everyone())
    hvd.allreduce(inputs, op=hvd.Sum).abs().square().sum().backward()
    near(inputs.grad, 2 * SIZE * total)
    inputs.grad = None
    (hvd.allgather(inputs).conj() * torch.cat(everyone())).real.sum().backward()
    near(inputs.grad, mine())


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_optimizer(compression: Any) -> None:
    """The gradient of ``a.conj()`` is a conjugate view. 16-bit compression leaves complex numbers alone."""
    a, b = (torch.nn.Parameter(mine(0, dtype=dtype)) for dtype in (torch.complex64, torch.complex128))
    real = torch.nn.Parameter(torch.zeros(3))
    assert torch.autograd.grad((a.conj() * mine()).real.sum(), a)[0].is_conj()
    optimizer = torch.optim.SGD([a, b, real], lr=0.1, momentum=0.9)
    named = [("a", a), ("b", b), ("c", real)]
    optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression)
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        tensor = mine(RANK + step)
        ((a.conj() * tensor).real.sum() + (b * tensor).imag.sum() + RANK * real.sum()).backward()
        mean = sum(mine(rank + step) for rank in range(SIZE)) / SIZE
        near(a.grad, mean)
        near(b.grad, (1j * mean.conj()).to(b.dtype))
        near(real.grad, torch.full((3,), (SIZE - 1) / 2))
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert len(set(hvd.allgather_object((a.sum().item(), b.sum().item())))) == 1


def test_weights_that_differ_are_seen() -> None:
    with other_settings({"RINGDANCE_CHECK_WEIGHTS": "error"}):
        weight = torch.nn.Parameter(1 + 1j * mine().real)  # only the imaginary parts differ
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])

        def train() -> None:
            for _ in range(12):
                optimizer.zero_grad()
                weight.abs().sum().backward()
                optimizer.step()

        with pytest.raises(MismatchError, match="'weight'"):
            train()
