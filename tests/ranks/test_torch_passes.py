"""When DistributedOptimizer exchanges gradients: several passes, groups, overlap, two losses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from steps import counting_steps
from torch import nn
from torch_nets import Net, assert_equal_weights, assert_same_on_all_ranks, joined_loss, loss_of, sgd

import ringdance.torch as hvd
from ringdance.training.gradients.exchange import Mode

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
on_host = pytest.mark.skipif(
    os.environ.get("RINGDANCE_CPU_OPERATIONS") == "gloo", reason="test_torch_device.py covers that path"
)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_backward_passes_per_step(passes: int, op: int) -> None:
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(
        sgd(net), net.named_parameters(), backward_passes_per_step=passes, op=op
    )
    plain = sgd(reference)
    for step in range(6):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(passes):
            loss_of(net, step * passes + part, RANK, branch=part == 0).backward()
            loss = joined_loss(reference, step * passes + part, lambda rank, part=part: part == 0)
            (loss * (SIZE if op == hvd.Sum else 1)).backward()
        # Clipping sees reduced gradients here too.
        assert float(nn.utils.clip_grad_norm_(net.parameters(), 3.0)) == pytest.approx(
            float(nn.utils.clip_grad_norm_(reference.parameters(), 3.0)), rel=1e-10
        )
        optimizer.step()
        plain.step()
    assert_equal_weights(net, reference, 1e-11)


def test_steps_are_counted() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), backward_passes_per_step=2)

    def train(steps: int) -> None:
        for step in range(2 * steps):
            loss_of(net, step, RANK).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    with counting_steps() as steps:
        train(3)
        assert steps() == 3
        hvd.mark_step()
        assert steps() == 1, "the optimizer's own steps no longer count"
        train(3)
        hvd.mark_step()
        assert steps() == 2


@several
def test_only_the_last_pass_communicates() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), backward_passes_per_step=2)
    loss_of(net, 0, RANK).backward()
    local = net.first.weight.grad.clone()
    every = hvd.allgather(local.unsqueeze(0))
    assert torch.equal(every[RANK], local)
    assert not torch.equal(every[0], every[-1])
    loss_of(net, 1, RANK).backward()
    every = hvd.allgather(net.first.weight.grad.unsqueeze(0))
    assert torch.equal(every[0], every[-1])
    optimizer.step()


def test_two_backward_passes_of_two_losses() -> None:
    """Like a discriminator's real and fake batches. Works without backward_passes_per_step."""
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(10):
        net.zero_grad()  # the module's method, which the optimizer does not notice
        loss_of(net, 2 * step, RANK).backward()
        loss_of(net, 2 * step + 1, RANK, branch=RANK == 0).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, 2 * step).backward()
        joined_loss(reference, 2 * step + 1, lambda rank: rank == 0).backward()
        plain.step()
    assert_equal_weights(net, reference, 1e-11)


@several
def test_sum_cannot_reduce_a_gradient_twice() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Sum)
    loss_of(net, 0, RANK).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(net, 1, RANK).backward()
    optimizer.zero_grad()
    loss_of(net, 2, RANK).backward()
    optimizer.step()
    assert_same_on_all_ranks(net)


@pytest.mark.parametrize("groups", [1, 3, "lists"])
@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_groups_and_predivide(groups: Any, predivide: float) -> None:
    """In some steps, some ranks do not use the branch, so that members of a group are missing."""
    net, reference = Net(), Net()
    chosen = [[net.last.weight, net.branch.weight], [net.first.bias]] if groups == "lists" else groups
    optimizer = hvd.DistributedOptimizer(
        sgd(net), net.named_parameters(), groups=chosen, gradient_predivide_factor=predivide
    )
    plain = sgd(reference)
    for step in range(10):
        uses = lambda rank, step=step: (step + rank) % 2 == 0  # noqa: E731
        optimizer.zero_grad()
        loss_of(net, step, RANK, uses(RANK)).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step, uses).backward()
        plain.step()
    assert_equal_weights(net, reference)


@several
def test_overlap_gives_the_same() -> None:
    """Sending several buckets during backward gives the same result, also if only some ranks use a branch."""
    results = []
    for overlap in (False, True):
        net = Net()
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), groups=3)
        optimizer._exchange.wants_overlap = overlap
        for step in range(10):
            optimizer.zero_grad()
            loss_of(net, step, RANK, (step // 2 + RANK) % 2 == 0).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        assert optimizer._exchange.overlap is overlap
        results.append(net)
    assert_equal_weights(*results)
    assert_same_on_all_ranks(results[1])


@several
@on_host
@pytest.mark.parametrize("which", ["one rank", "all ranks", "turns"])
def test_other_gradients_after_many_usual_steps(which: str) -> None:
    """In steps with a new gradient, all ranks leave the fast path that works without a mask."""
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    other = {"one rank": lambda rank, step: rank == 0, "all ranks": lambda rank, step: True,
             "turns": lambda rank, step: step % SIZE == rank}[which]  # fmt: skip
    went = []
    for step in range(40):
        uses = lambda rank, step=step: step % 10 in (7, 9) and other(rank, step)  # noqa: E731
        went.append(optimizer._exchange.mode is Mode.FAST)
        optimizer.zero_grad()
        loss_of(net, step, RANK, uses(RANK)).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step, uses).backward()
        plain.step()
    assert_equal_weights(net, reference)
    assert_same_on_all_ranks(net)
    assert (went[5], went[7], went[8]) == (True, True, False)
    assert {True, False} == set(went[17:])
    assert went == hvd.broadcast_object(went, name="went")


@several
@on_host
def test_different_steps_raise_on_the_short_way() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    for step in range(12):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
    assert optimizer._exchange.mode is Mode.FAST
    loss_of(net, 20, RANK).backward()
    if RANK == 0:
        optimizer.step()
    with pytest.raises(RuntimeError, match="different steps"):
        loss_of(net, 21, RANK).backward()


@several
def test_different_numbers_of_passes_raise_on_all_ranks() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())

    def train() -> None:
        for step in range(2):
            loss_of(net, step, RANK).backward()
            if RANK == 0 and step == 0:
                loss_of(net, step, RANK).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="different steps"):
        train()
    hvd.barrier()


def test_reduce_in_step_only() -> None:
    """With reduce_in_backward=False, step() makes one exchange, whatever each rank's number of passes."""
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), reduce_in_backward=False)
    plain = sgd(reference)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        if RANK == 0:
            loss_of(net, step + 100, RANK).backward()
        optimizer.step()
        plain.zero_grad()
        (joined_loss(reference, step) + loss_of(reference, step + 100, 0) / SIZE).backward()
        plain.step()
    assert_equal_weights(net, reference)
