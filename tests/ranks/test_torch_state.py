"""Parameters, optimizer state, objects, and batch normalization over all ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sampled import sampled
from torch import nn

import ringdance.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2, dtype=torch.bfloat16))


def test_broadcast_parameters() -> None:
    net = network(RANK)
    net[0].to(memory_format=torch.channels_last)
    root = SIZE - 1
    expected = network(root)
    named = net.named_parameters
    for item in (net.state_dict(), list(named()), [*net.parameters()], named()):
        hvd.broadcast_parameters(item, root)
        for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(root - RANK)
    for wrong in (3, "weights", torch.ones(2), [(1, 2, 3)]):
        with pytest.raises(ValueError):
            hvd.broadcast_parameters(wrong, root)


OPTIMIZERS: dict[str, Any] = {
    "SGD": dict(lr=0.1), "Adadelta": {}, "Adagrad": {}, "Adam": dict(amsgrad=True), "AdamW": {}, "Adamax": {},
    "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": dict(momentum=0.5, centered=True), "Rprop": {},
    "LBFGS": {}, "SparseAdam": {}, "Adafactor": {},
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", sampled("states", list(OPTIMIZERS), 4))
def test_broadcast_optimizer_state(name: str, wrapped: bool, fresh: bool) -> None:
    """Only the root has made steps, or (fresh) no rank has. Other options differ too."""
    root = SIZE - 1

    def build(steps: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        sparse = name == "SparseAdam"
        net = nn.Embedding(5, 3, sparse=True) if sparse else nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = getattr(torch.optim, name)(net.parameters(), **{**OPTIMIZERS[name], "lr": lr})

        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(torch.tensor([1, 2]) if sparse else torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return net, optimizer

    steps = 0 if fresh else 3
    expected = build(steps, 0.25)[1].state_dict()
    net, optimizer = build(steps if root == RANK else 0, 0.25 if root == RANK else 0.5)
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root)
    result = optimizer.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))  # no step was made
    assert_equal_structure(result, expected)


def assert_equal_structure(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_equal_structure(found[key], expected[key])
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal_structure(a, b)
    else:
        assert found == expected


@pytest.mark.ranks(2, 3, 4)
def test_optimizers_of_different_models() -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + (RANK == 1))])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if RANK == 1:
        with pytest.raises(ValueError, match="same model"):
            hvd.broadcast_optimizer_state(optimizer, 0)
    else:
        hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.barrier()


def test_objects() -> None:
    """Types and sizes differ between ranks; functions too."""
    mine: Any = [None, {"rank": RANK}, "x" * 100_000, lambda value: value + RANK][RANK]
    for root in range(SIZE):
        result = hvd.broadcast_object(mine, root)
        assert type(result) is [type(None), dict, str, type(lambda: 0)][root]
        assert (result is mine) or root != RANK
    everything = hvd.allgather_object(mine, name="things")
    assert len(everything) == SIZE
    assert everything[0] is None
    if SIZE == 4:
        assert everything[3](1) == 4


@pytest.mark.ranks(2, 3, 4)
def test_an_object_that_cannot_be_pickled() -> None:
    bad = (value for value in ())  # generators cannot be sent
    with pytest.raises(TypeError if RANK == 0 else RuntimeError, match="pickle"):
        hvd.broadcast_object(bad if RANK == 0 else None, 0)
    with pytest.raises(TypeError if RANK == 0 else RuntimeError, match="pickle"):
        hvd.allgather_object(bad if RANK == 0 else 1)
    assert hvd.allgather_object(RANK) == list(range(SIZE))


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_sync_batch_norm_equals_batch_norm_on_the_joined_batch(dims: int, affine: bool) -> None:
    rows = [rank + 1 + (SIZE == 1) for rank in range(SIZE)]  # uneven numbers of rows
    shape = (3,) + (2, 3, 2)[:dims]
    made = torch.Generator().manual_seed(5)
    joined = torch.randn((sum(rows), *shape), dtype=torch.float64, generator=made) * 3 + 100
    gradient = torch.randn(joined.shape, dtype=torch.float64, generator=made)
    own = slice(sum(rows[:RANK]), sum(rows[: RANK + 1]))
    sync = hvd.SyncBatchNorm(3, momentum=0.3, affine=affine).double()
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    plain = kind(3, momentum=0.3, affine=affine).double()
    if affine:
        for model in (sync, plain):
            model.weight.data.copy_(torch.tensor([0.5, 1.5, 2.0]))
            model.bias.data.copy_(torch.tensor([1.0, 0.0, -1.0]))
    x, whole = joined[own].clone().requires_grad_(), joined.clone().requires_grad_()
    for _ in range(2):
        output, expected = sync(x), plain(whole)
    assert torch.allclose(output, expected[own], atol=1e-11)
    assert torch.allclose(sync.running_mean, plain.running_mean)
    assert torch.allclose(sync.running_var, plain.running_var)
    assert sync.num_batches_tracked == plain.num_batches_tracked
    output.backward(gradient[own])
    expected.backward(gradient)
    assert torch.allclose(x.grad, whole.grad[own], atol=1e-11)
    if affine:
        assert torch.allclose(hvd.allreduce(sync.weight.grad, op=hvd.Sum), plain.weight.grad)
        assert torch.allclose(hvd.allreduce(sync.bias.grad, op=hvd.Sum), plain.bias.grad)
    sync.eval(), plain.eval()
    assert torch.allclose(sync(x), plain(whole)[own])


def test_sync_batch_norm_far_from_zero() -> None:
    inputs = [np.random.default_rng(rank).normal(1000, 0.05, (50 + rank, 2)) for rank in range(SIZE)]
    sync = hvd.SyncBatchNorm(2, momentum=1.0)
    sync(torch.tensor(inputs[RANK], dtype=torch.float32))
    variance = np.concatenate(inputs).astype("float32").astype(float).var(0, ddof=1)
    np.testing.assert_allclose(sync.running_var, variance, rtol=1e-3)


def test_sync_batch_norm_in_double_precision() -> None:
    inputs = [np.random.default_rng(rank).normal(1e8, 1, (50 + rank, 2)) for rank in range(SIZE)]
    inputs[SIZE - 1] = inputs[SIZE - 1][: 0 if SIZE > 1 else None]  # one rank has no rows
    sync = hvd.SyncBatchNorm(2, momentum=1.0).double()
    sync(torch.tensor(inputs[RANK]))
    np.testing.assert_allclose(sync.running_var, np.concatenate(inputs).var(0, ddof=1), rtol=1e-6)


def test_sync_batch_norm_more() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    untracked = hvd.SyncBatchNorm(2, track_running_stats=False).eval()
    plain = nn.BatchNorm1d(2, track_running_stats=False).eval()
    joined = torch.randn(3 * SIZE, 2, generator=torch.Generator().manual_seed(1))
    own = slice(3 * RANK, 3 * RANK + 3)
    assert torch.allclose(untracked(joined[own]), plain(joined)[own], atol=1e-5)
    assert hvd.SyncBatchNorm(2).bfloat16()(joined[own].bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("named", [True, False])
def test_training_with_batch_norm_equals_one_process(named: bool) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 5), hvd.SyncBatchNorm(5), nn.ReLU(), nn.Linear(5, 1)).double()
    reference = copy.deepcopy(net)
    reference[1] = nn.BatchNorm1d(5).double()
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.01), net.named_parameters() if named else None
    )
    joined = torch.randn(4 * SIZE, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for _ in range(5):
        optimizer.zero_grad(), plain.zero_grad()
        net(joined[4 * RANK : 4 * RANK + 4]).square().mean().backward()
        reference(joined).square().mean().backward()
        optimizer.step(), plain.step()
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)
