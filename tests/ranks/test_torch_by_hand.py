"""Gradients that are not computed by a backward pass are reduced before a step uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import counting_exchanges
from torch import Tensor, nn

import ringdance.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
MEAN = (SIZE + 1) / 2
STEPS = 12  # enough for the ranks to exchange without masks
X = torch.full((1, 2), RANK + 1.0)  # the gradient of net(X).sum()

Fill = Callable[[nn.Linear, Any], object]


def assigned(net: nn.Linear, optimizer: Any) -> None:
    net.weight.grad = X.clone()


def autograd_grad(net: nn.Linear, optimizer: Any) -> None:
    (net.weight.grad,) = torch.autograd.grad(net(X).sum(), [net.weight])


def func_grad(net: nn.Linear, optimizer: Any) -> None:
    loss = lambda weights: torch.func.functional_call(net, weights, (X,)).sum()  # noqa: E731
    net.weight.grad = torch.func.grad(loss)({"weight": net.weight})["weight"]


def master_weights(net: nn.Linear, optimizer: Any) -> None:
    """Copy into a persistent gradient, as mixed-precision optimizers with float32 weights do."""
    small = nn.Linear(2, 1, bias=False).bfloat16()
    small(X.bfloat16()).sum().backward()
    if net.weight.grad is None:
        net.weight.grad = torch.zeros_like(net.weight)
    net.weight.grad.copy_(small.weight.grad)


def data_of_master_weights(net: nn.Linear, optimizer: Any) -> None:
    """Do the same without clearing gradients, like scripts that overwrite them anyway."""
    optimizer.zero_grad = lambda: None
    master_weights(net, optimizer)


def replaced_after_backward(net: nn.Linear, optimizer: Any) -> None:
    """Replace gradients by individually clipped sample gradients (differential privacy)."""
    (net(X).sum() * 9).backward()
    net.weight.grad = X.clone()


def replaced_in_the_same_place(net: nn.Linear, optimizer: Any) -> None:
    """Replace the gradient by a tensor that may reuse the old one's address and ``id()``."""
    (net(X).sum() * 9).backward()
    net.weight.grad = None
    net.weight.grad = X.clone()


def projected(net: nn.Linear, optimizer: Any) -> None:
    """Combine two losses with a backward pass each, as PCGrad does."""
    gradients: list[Tensor] = []
    for factor in (0.5, 1.5):
        optimizer.zero_grad()
        (net(X).sum() * factor).backward()
        gradients.append(net.weight.grad.clone())
    net.weight.grad = (gradients[0] + gradients[1]) / 2


def clipped(net: nn.Linear, optimizer: Any) -> None:
    """Change the gradient in place after a backward pass. It must not be reduced again."""
    net(X).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)


def by_synchronize(net: nn.Linear, optimizer: Any) -> None:
    """Reduce by hand, then use the gradient unchanged."""
    net.weight.grad = X.clone()
    optimizer.synchronize()
    net.weight.grad = net.weight.grad * 1
    optimizer.reduced = True


CASES: list[tuple[Fill, dict[str, Any], int]] = [  # the last value is the number of exchanges per step
    (assigned, {}, 1), (assigned, {"op": hvd.Sum}, 1), (assigned, {"reduce_in_backward": False}, 1),
    (assigned, {"compression": hvd.Compression.fp16}, 1), (autograd_grad, {}, 1), (func_grad, {}, 1),
    (autograd_grad, {"backward_passes_per_step": 2}, 1), (func_grad, {"op": hvd.Sum}, 1),
    (master_weights, {}, 1), (master_weights, {"op": hvd.Sum}, 1), (data_of_master_weights, {}, 1),
    (data_of_master_weights, {"op": hvd.Sum}, 1),
    (data_of_master_weights, {"op": hvd.Sum, "reduce_in_backward": False}, 1),
    (replaced_after_backward, {}, 2), (replaced_in_the_same_place, {}, 2),
    (replaced_after_backward, {"reduce_in_backward": False}, 1),
    (replaced_after_backward, {"op": hvd.Sum, "reduce_in_backward": False}, 1),
    (projected, {}, 3), (clipped, {}, 1), (clipped, {"op": hvd.Sum}, 1),
    (by_synchronize, {}, 1), (by_synchronize, {"op": hvd.Sum}, 1),
]  # fmt: skip


@several
@pytest.mark.parametrize(("fill", "options", "exchanges"), CASES)
def test_every_gradient_is_reduced_once(fill: Fill, options: dict[str, Any], exchanges: int) -> None:
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    base = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer: Any = hvd.DistributedOptimizer(base, net.named_parameters(), **options)
    with counting_exchanges() as count:
        for _ in range(STEPS):
            optimizer.zero_grad()
            fill(net, optimizer)
            if getattr(optimizer, "reduced", False):
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
    expected = MEAN * (SIZE if options.get("op") == hvd.Sum else 1)
    torch.testing.assert_close(-net.weight / STEPS, torch.full((1, 2), expected))
    assert count() == exchanges * STEPS


@several
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_part_by_hand_and_a_part_by_backward(op: int, to_none: bool) -> None:
    """One exchange reduces both parts, also if they differ between ranks. Earlier gradients are kept."""
    first, second, third = nets = [nn.Linear(2, 1, bias=False) for _ in range(3)]
    for net in nets:
        nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([net.weight for net in nets], lr=1.0),
        [(str(number), net.weight) for number, net in enumerate(nets)], op=op,
    )
    (first(X) + second(X) + third(X)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    with counting_exchanges() as count:
        for _ in range(STEPS):
            nn.Module.zero_grad(first), nn.Module.zero_grad(second)
            by_hand, by_backward = (first, second) if RANK % 2 else (second, first)
            by_hand.weight.grad = X.clone()
            by_backward(X).sum().backward()
            optimizer.step()
    assert count() == STEPS
    expected = MEAN * (SIZE if op == hvd.Sum else 1)
    for net in (first, second):
        torch.testing.assert_close(-net.weight, torch.full((1, 2), expected * (STEPS + 1)))
    torch.testing.assert_close(-third.weight, torch.full((1, 2), expected))


@several
def test_a_sum_cannot_be_replaced() -> None:
    """The replacement may be local or computed from the reduced gradient, so all ranks raise."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Sum)
    optimizer.zero_grad()
    replaced_after_backward(net, optimizer)
    with pytest.raises(AssertionError, match=r"or replaced, after.*skip_synchronize\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    clipped(net, optimizer)
    optimizer.step()


@several
def test_gradients_that_one_rank_alone_replaces() -> None:
    """All ranks raise in the next exchange. None waits, and none continues with its own values."""
    net = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            net(X).sum().backward()
            if RANK == 0:
                net.weight.grad = X.clone()
            optimizer.step()

    with pytest.raises(RuntimeError, match="replace gradients after a pass on all ranks or none"):
        train()
    hvd.barrier()


@several
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_closure_that_sets_gradients(op: int, in_place: bool) -> None:
    net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(net.weight)
    base = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe")
    optimizer = hvd.DistributedOptimizer(base, op=op)
    factor = 1 / SIZE if op == hvd.Sum else 1.0  # the loss is averaged

    def closure() -> Tensor:
        loss = (net(X.double()) - 1).square().sum()
        (gradient,) = torch.autograd.grad(loss * factor, [net.weight])
        if in_place and net.weight.grad is not None:
            net.weight.grad.copy_(gradient)
        else:
            net.weight.grad = gradient
        return loss

    for _ in range(3):
        optimizer.step(closure)
    # The mean of (k * w - 1)**2 for k = 1 to SIZE, where w is the sum of both weights, has its minimum here.
    best = sum(range(1, SIZE + 1)) / sum(k * k for k in range(1, SIZE + 1))
    assert float(net.weight.detach().sum()) == pytest.approx(best, abs=1e-6)
