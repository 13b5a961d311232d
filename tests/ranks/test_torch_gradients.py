"""DistributedOptimizer with unusual gradients: sparse, compressed, recomputed, in other layouts, new."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch_nets import Net, assert_equal_weights, assert_same_on_all_ranks, data, joined_loss, loss_of, sgd

import ringdance.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
])
def test_sparse_gradients_missing_on_a_rank(overlap: bool, as_dense: bool, make: Any) -> None:
    def table() -> nn.Embedding:
        torch.manual_seed(1)
        return nn.Embedding(9, 4, sparse=True, dtype=torch.float64)

    net, reference = table(), table()
    optimizer = hvd.DistributedOptimizer(
        make(net.parameters()), net.named_parameters(), sparse_as_dense=as_dense
    )
    if SIZE > 1:
        optimizer._exchange.wants_overlap = overlap
    plain = make(reference.parameters())
    places = [torch.tensor([rank, 2, 5]) for rank in range(SIZE)]
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        idle = step % SIZE if SIZE > 1 else -1
        if idle != RANK:
            net(places[RANK]).square().sum().backward()
            assert net.weight.grad.is_sparse
        optimizer.step()
        losses = [reference(places[rank]).square().sum() for rank in range(SIZE) if rank != idle]
        (sum(losses) / SIZE).backward()
        plain.step()
    if as_dense and isinstance(plain, torch.optim.SparseAdam):
        # Rows that no rank touched are explicit zeros in the gradient, which affect SparseAdam's moments.
        assert_same_on_all_ranks(net)
    else:
        assert_equal_weights(net, reference)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(compression: Any) -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), compression=compression)
    loss_of(net, 0, RANK).backward()
    grads = [net.first.weight.grad]
    assert grads[0].dtype is torch.float64
    if SIZE > 1:
        small = torch.float16 if compression is hvd.Compression.fp16 else torch.bfloat16
        reference = []
        for rank in range(SIZE):
            first = Net()
            loss_of(first, 0, rank).backward()
            reference.append(first.first.weight.grad.to(small).float())
        mean = torch.stack(reference).sum(0) / SIZE
        assert torch.equal(grads[0], mean.to(small).double())
    optimizer.step()
    assert_same_on_all_ranks(net)


def test_reentrant_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    def make(dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(2)
        layers = [nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]
        return nn.Sequential(*layers).to(dtype)

    net, reference = make(), make()
    optimizer = hvd.DistributedOptimizer(
        sgd(net), net.named_parameters(), backward_passes_per_step=2, op=hvd.Sum
    )
    plain = sgd(reference)
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(2):
            x, y = data(step * 2 + part, RANK)
            inner = checkpoint(net[2], net[1](net[0](x)), use_reentrant=True)
            ((net[3](inner) - y) ** 2).mean().backward()
            (joined_loss_plain(reference, step * 2 + part) * SIZE).backward()
        optimizer.step()
        plain.step()
    assert_equal_weights(net, reference)


def joined_loss_plain(net: nn.Module, step: int) -> Any:
    losses = [((net(x) - y) ** 2).mean() for x, y in (data(step, rank) for rank in range(SIZE))]
    return sum(losses) / SIZE


def test_a_parameter_that_begins_to_need_a_gradient() -> None:
    net, reference = Net(), Net()
    for network in (net, reference):
        network.first.weight.requires_grad_(False)
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(8):
        if step == 3:
            net.first.weight.requires_grad_(True), reference.first.weight.requires_grad_(True)
        if step == 6:
            net.last.bias.requires_grad_(False), reference.last.bias.requires_grad_(False)
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        plain.step()
    assert_equal_weights(net, reference)


def test_gradients_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(net)
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    plain = sgd(reference)
    made = torch.Generator(torch.empty(0).device).manual_seed(1)
    images = [torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=made) for _ in range(SIZE)]
    for _ in range(3):
        optimizer.zero_grad(), plain.zero_grad()
        net(images[RANK]).square().mean().backward()
        (sum(reference(image).square().mean() for image in images) / SIZE).backward()
        optimizer.step(), plain.step()
    assert_equal_weights(net, reference)
