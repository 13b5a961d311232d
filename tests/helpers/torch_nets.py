"""What the rank tests train: a small net, its data by step and rank, and comparisons. Call init() first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import ringdance.torch as hvd


class Net(nn.Module):
    """An MLP with a branch that only some batches use, and one parameter that is never used."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 12, dtype=dtype)
        self.last = nn.Linear(12, 3, dtype=dtype)
        self.branch = nn.Linear(12, 3, dtype=dtype)
        self.idle = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) + (self.branch(hidden) if branch else 0.0)


def data(step: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    made = np.random.default_rng([step, rank])
    x, y = made.normal(size=(4, 7)), made.normal(size=(4, 3))
    return torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)


def loss_of(
    net: nn.Module, step: int, rank: int, branch: bool = False, dtype: torch.dtype = torch.float64
) -> Any:
    x, y = data(step, rank, dtype=dtype)
    return ((net(x, branch) - y) ** 2).mean()


def joined_loss(net: nn.Module, step: int, branch: Callable[[int], bool] = lambda rank: False) -> Any:
    """Return the mean loss over all ranks' batches, which is what a single process would train on."""
    return sum(loss_of(net, step, rank, branch(rank)) for rank in range(hvd.size())) / hvd.size()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def assert_equal_weights(net: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, value), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(value, expected, rtol=0, atol=tolerance), name


def assert_same_on_all_ranks(net: nn.Module) -> None:
    states = hvd.allgather_object([value.detach().clone() for value in net.parameters()])
    for state in states:
        for first, value in zip(states[0], state, strict=True):
            assert torch.equal(first, value)
