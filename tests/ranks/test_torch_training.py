"""Training with DistributedOptimizer on n ranks equals one process training on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_nets import Net, assert_equal_weights, assert_same_on_all_ranks, joined_loss, loss_of, sgd

import ringdance.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def test_fifty_steps_equal_one_process() -> None:
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    plain = sgd(reference)
    for step in range(50):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        plain.step()
    assert_equal_weights(net, reference)
    assert_same_on_all_ranks(net)
    assert net.idle.grad is None  # no rank used it: its gradient is not zero but missing, so no weight decay


def test_clipping_as_people_write_it() -> None:
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
        assert float(norm) == pytest.approx(float(expected), abs=1e-12)
    assert_equal_weights(net, reference)


def test_a_parameter_unused_on_some_ranks_with_clipping() -> None:
    """In each step another rank skips the branch, and in every third step no rank uses it."""
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(30):
        uses = lambda rank, step=step: step % 3 != 0 and rank != step % SIZE  # noqa: E731
        optimizer.zero_grad()
        loss_of(net, step, RANK, uses(RANK)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step, uses).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
    assert_equal_weights(net, reference)
    assert_same_on_all_ranks(net)


def test_a_rank_without_backward_takes_part_in_step() -> None:
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(6):
        optimizer.zero_grad()
        plain.zero_grad()
        idle = step % SIZE if SIZE > 1 else -1
        if idle != RANK:
            loss_of(net, step, RANK).backward()
        optimizer.step()
        (sum(loss_of(reference, step, rank) for rank in range(SIZE) if rank != idle) / SIZE).backward()
        plain.step()
    assert_equal_weights(net, reference)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_grad_scaler_with_an_inf_on_one_rank(compression: Any) -> None:
    net = Net(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression=compression
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    reference = Net(torch.float32)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    other = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    for step in range(8):
        bad = step in (2, 5)
        optimizer.zero_grad()
        loss = loss_of(net, step, RANK, dtype=torch.float32)
        scaler.scale(loss * float("inf") if bad and RANK == SIZE - 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        joined = sum(loss_of(reference, step, rank, dtype=torch.float32) for rank in range(SIZE)) / SIZE
        other.scale(joined * float("inf") if bad else joined).backward()
        other.unscale_(plain)
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        other.step(plain)
        other.update()
        assert scaler.get_scale() == other.get_scale()
    assert_same_on_all_ranks(net)
    assert_equal_weights(net, reference, 1e-6 if compression is hvd.Compression.none else 2e-3)


@pytest.mark.parametrize("make", [
    lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    lambda net: torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
])
def test_gradients_computed_in_a_closure_are_reduced(make: Any) -> None:
    net, reference = Net(), Net()
    del net.idle, reference.idle  # LBFGS needs a gradient for each parameter
    del net.branch, reference.branch
    optimizer, plain = hvd.DistributedOptimizer(make(net), net.named_parameters()), make(reference)
    for step in range(4):
        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, step, RANK)
            loss.backward()
            return loss

        def joined(step: int = step) -> Any:
            plain.zero_grad()
            loss = joined_loss(reference, step)
            loss.backward()
            return loss

        optimizer.step(closure)
        plain.step(joined)
    assert_equal_weights(net, reference, 1e-10)


def test_runs_are_bit_equal_in_float32() -> None:
    def run() -> list[torch.Tensor]:
        net = Net(torch.float32)
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
        for step in range(20):
            optimizer.zero_grad()
            loss_of(net, step, RANK, dtype=torch.float32).backward()
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)
