"""Contract, torch: DistributedOptimizer and compression.

What every rank must have after a step is computed in one process from all ranks' data.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_inputs import MOVED, RANK, SIZE, gpu, several
from sampled import sampled
from test_torch_state import OPTIMIZERS, OPTIONS, optimizer_of
from torch import Tensor, nn

import horovod.torch as hvd

Branch = Callable[[int, int], bool]


class Net(nn.Module):
    """Two branches: each rank uses one, so it lacks the gradients of the other."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.left = nn.Linear(6, 2)
        self.right = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor, left: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.left(hidden) if left else self.right(hidden)


def alternating(step: int, rank: int) -> bool:
    return (step + rank) % 2 == 0


def loss_of(net: nn.Module, step: int, rank: int, branch: Branch = alternating) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(5, n, generator=made, dtype=torch.float64) for n in (4, 2))
    return (net(x, branch(step, rank)) - y).square().mean()


def mean_loss(net: nn.Module, step: int, ranks: Any = None) -> Tensor:
    ranks = range(SIZE) if ranks is None else ranks
    return sum((loss_of(net, step, rank) for rank in ranks), torch.zeros(())) / len(ranks)


def alike(net: nn.Module, reference: nn.Module, tolerance: float = 1e-9) -> None:
    for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def equal_on_all_ranks(net: nn.Module) -> None:
    for tensor in net.parameters():
        assert torch.equal(hvd.broadcast(tensor.detach(), 0), tensor)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def test_compression_fp16() -> None:
    for dtype in MOVED:
        tensor = torch.linspace(-3.0, 3.0, 50).to(dtype)
        small, context = hvd.Compression.fp16.compress(tensor)
        assert small.dtype is (torch.float16 if dtype.is_floating_point else dtype)
        back = hvd.Compression.fp16.decompress(small, context)
        assert back.dtype is dtype
        assert (back.double() - tensor.double()).abs().max() < 2e-3
        assert torch.equal(hvd.Compression.none.compress(tensor)[0], tensor)
    array = torch.full((9,), 1.0 + RANK)
    assert hvd.allreduce(array, compression=hvd.Compression.fp16).tolist() == [(SIZE + 1) / 2] * 9


@pytest.mark.parametrize("name", sampled("optimizers with branches", list(OPTIMIZERS), 4))
def test_every_optimizer_with_branches(name: str) -> None:
    for options in OPTIONS:
        net, reference = Net(), Net()
        base = optimizer_of(name, net, options)
        optimizer = hvd.DistributedOptimizer(base, named_parameters=net.named_parameters())
        assert isinstance(optimizer, type(base))
        plain = optimizer_of(name, reference, options)
        for step in range(5):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(net, step, RANK).backward()
            mean_loss(reference, step).backward()
            optimizer.step()
            plain.step()
        equal_on_all_ranks(net)
        # Muon works in bfloat16, which exposes differences in a gradient's last place.
        alike(net, reference, 0.1 if name == "Muon" else 1e-7)


def test_model_on_two_gpus() -> None:
    if gpu(0) == gpu(1):
        pytest.skip("needs two GPUs")
    first, second = gpu(2 * hvd.local_rank()), gpu(2 * hvd.local_rank() + 1)
    parts = nn.ModuleList([nn.Linear(4, 6).to(first), nn.Linear(6, 2).to(second)])
    hvd.broadcast_parameters(parts.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd(parts), parts.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        hidden = torch.tanh(parts[0](torch.full((5, 4), RANK + 1.0, device=first)))
        parts[1](hidden.to(second)).square().mean().backward()
        optimizer.step()
    equal_on_all_ranks(parts)


def combine(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - (dot / (2 * aa) if aa else 0)) * a + (1 - (dot / (2 * bb) if bb else 0)) * b


def test_adasum_combines_the_changes_of_the_weights() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum)
    if SIZE & (SIZE - 1):
        loss_of(net, 0, RANK).backward()
        with pytest.raises(NotImplementedError):
            optimizer.step()
        return
    replicas = [Net() for _ in range(SIZE)]
    plain = [sgd(replica) for replica in replicas]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
        starts = copy.deepcopy(replicas[0])
        for rank in range(SIZE):
            plain[rank].zero_grad()
            loss_of(replicas[rank], step, rank).backward()
            plain[rank].step()
        for start, *ends in zip(*[item.parameters() for item in [starts, *replicas]], strict=True):
            changes = [end.detach() - start.detach() for end in ends]
            while len(changes) > 1:
                changes = [combine(a, b) for a, b in zip(changes[::2], changes[1::2], strict=True)]
            for end in ends:
                end.data.copy_(start.detach() + changes[0])
    alike(net, replicas[0])


def test_duplicate_names() -> None:
    net = Net()
    pairs = [("weight", parameter) for parameter in net.parameters()]
    with pytest.raises(ValueError, match="weight"):
        hvd.DistributedOptimizer(sgd(net), pairs)


def test_missing_names() -> None:
    net = Net()
    with pytest.raises(ValueError, match="named_parameters"):
        hvd.DistributedOptimizer(sgd(net), list(net.named_parameters())[1:])
    with pytest.raises(ValueError, match="pairs"):
        hvd.DistributedOptimizer(sgd(net), list(net.parameters()))


def test_toggled_requires_grad() -> None:
    """As in a GAN, each part is trained while the other is frozen."""
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    plain = sgd(reference)
    for step in range(8):
        for network in (net, reference):
            for parameter in network.first.parameters():
                parameter.requires_grad_(step % 2 == 0)
            for parameter in [*network.left.parameters(), *network.right.parameters()]:
                parameter.requires_grad_(step % 2 == 1)
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(net, step, RANK).backward()
        mean_loss(reference, step).backward()
        optimizer.step()
        plain.step()
    alike(net, reference)


def test_clipping() -> None:
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    plain = sgd(reference)
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        mean_loss(reference, step).backward()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(reference.parameters(), 0.1), norm)
        plain.step()
    alike(net, reference)


@several
def test_one_warning_if_synchronize_comes_twice() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    loss_of(net, 0, RANK).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(seen) == 1
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(seen[0].message)
    equal_on_all_ranks(net)


def train(optimizer: Any, net: nn.Module) -> None:
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()


def trained_alone(ranks: Any = None) -> nn.Module:
    net = Net()
    plain = sgd(net)
    for step in range(3):
        plain.zero_grad()
        mean_loss(net, step, ranks).backward()
        plain.step()
    return net


def test_default_names() -> None:
    """Names are allreduce.noname.<group>.<place>: rank 0 passes no names, and the others pass these."""
    net = Net()
    said = [(f"allreduce.noname.0.{place}", value) for place, value in enumerate(net.parameters())]
    train(hvd.DistributedOptimizer(sgd(net), named_parameters=None if RANK == 0 else said), net)
    alike(net, trained_alone())


def test_no_names_and_two_groups() -> None:
    net = Net()
    rest = [*net.left.parameters(), *net.right.parameters()]
    groups = [{"params": net.first.parameters()}, {"params": rest, "lr": 0.1}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    train(optimizer, net)
    alike(net, trained_alone())


@several
def test_process_set(halves: Any) -> None:
    """Members of one set train together, and every other rank trains alone."""
    mine, other = halves
    even = mine if 0 in mine.ranks else other
    net = Net()
    train(hvd.DistributedOptimizer(sgd(net), net.named_parameters(), process_set=even), net)
    alike(net, trained_alone(even.ranks if even.included() else [RANK]))
