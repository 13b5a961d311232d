"""Contract, torch: batch normalization over all ranks, and sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_inputs import RANK, SIZE, several
from torch import Tensor, nn

import horovod.torch as hvd


@pytest.mark.parametrize("length", [2, 1])
def test_sync_batch_norm(device: Any, length: int) -> None:
    """It equals BatchNorm1d on all ranks' stacked inputs, which have different numbers of rows."""
    rows = [rank + 2 for rank in range(SIZE)]
    made = torch.Generator().manual_seed(5)
    joined = (torch.randn(sum(rows), 4, length, generator=made) * 3 + 1).to(device)
    incoming = torch.randn(joined.shape, generator=made).to(device)
    own = slice(sum(rows[:RANK]), sum(rows[: RANK + 1]))
    sync, plain = hvd.SyncBatchNorm(4).to(device), nn.BatchNorm1d(4).to(device)
    mine, whole = joined[own].clone().requires_grad_(), joined.clone().requires_grad_()
    output, want = sync(mine), plain(whole)
    output.backward(incoming[own])
    want.backward(incoming)

    def near(got: Tensor | None, wanted: Tensor) -> None:
        assert got is not None
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    near(output, want[own])
    near(sync.running_mean, plain.running_mean)
    near(sync.running_var, plain.running_var)
    near(mine.grad, whole.grad[own])
    near(hvd.allreduce(sync.weight.grad, op=hvd.Sum), plain.weight.grad)
    near(hvd.allreduce(sync.bias.grad, op=hvd.Sum), plain.bias.grad)


def table() -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(10, 3, sparse=True, dtype=torch.float64)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_embedding(device: Any, sparse_as_dense: bool) -> None:
    net, reference = table().to(device), table().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5),
        named_parameters=net.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    places = [torch.tensor([rank, 4, 4, 9], device=device) for rank in range(SIZE)]
    for _ in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        net(places[RANK]).square().sum().backward()
        (sum(reference(place).square().sum() for place in places) / SIZE).backward()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(net.weight, reference.weight, rtol=1e-12, atol=1e-12)


def entries(rank: int, device: Any) -> Tensor:
    """Return row `rank`, and row 3, which all ranks have."""
    indices, values = [[rank, 3]], [[rank + 1.0, 2.0], [5.0, rank + 7.0]]
    made = torch.sparse_coo_tensor(indices, values, (SIZE + 4, 2), check_invariants=True)
    return made.to(device)


def check_sparse(device: Any, members: list[int], **chosen: Any) -> None:
    total = sum((entries(rank, device).to_dense() for rank in members), torch.zeros((), device=device))
    for op, want in ((hvd.Sum, total), (hvd.Average, total / len(members))):
        waits = [
            hvd.sparse_allreduce_async(entries(RANK, device), name=f"entries.{k}", op=op, **chosen)
            for k in range(3)
        ]
        for wait in waits:
            result = wait()
            assert result.is_sparse
            torch.testing.assert_close(result.to_dense(), want)


def test_sparse_allreduce(device: Any) -> None:
    check_sparse(device, list(range(SIZE)))


@several
def test_sparse_allreduce_in_a_process_set(device: Any, halves: Any) -> None:
    check_sparse(device, halves[0].ranks, process_set=halves[0])
