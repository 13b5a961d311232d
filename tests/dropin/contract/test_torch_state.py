"""Contract, torch: one rank's parameters, optimizer state and objects for all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from contract_inputs import RANK, SIZE, several
from sampled import sampled
from torch import Tensor, nn

import horovod.torch as hvd

# LBFGS and SparseAdam are excluded, as in the contract: it does not broadcast LBFGS, and SparseAdam needs
# sparse gradients.
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
)
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.2},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "betas": (0.8, 0.9),
     "amsgrad": True, "rho": 0.7, "etas": (0.4, 1.3), "t0": 3.0, "foreach": False},
]  # fmt: skip


def model(seed: int, device: Any) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).to(device)


def optimizer_of(name: str, net: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name)
    known = inspect.signature(kind).parameters
    # Muon accepts only matrices.
    parameters = [parameter for parameter in net.parameters() if name != "Muon" or parameter.dim() == 2]
    return kind(parameters, **{key: value for key, value in options.items() if key in known})


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: Any) -> None:
    for step in range(number):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(step)
        net(torch.randn(5, 4, generator=made).to(device)).square().mean().backward()
        optimizer.step()


def alike(mine: Any, root: Any) -> None:
    """Assert that values and types are equal at every level, with tensors on this rank's device."""
    assert type(mine) is type(root)
    if isinstance(mine, Tensor):
        assert mine.dtype is root.dtype
        assert torch.equal(mine.cpu(), root.cpu())
    elif isinstance(mine, dict):
        assert list(mine) == list(root)
        for key in mine:
            alike(mine[key], root[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(root)
        for actual, other in zip(mine, root, strict=True):
            alike(actual, other)
    else:
        assert mine == root


def check(name: str, options: dict[str, Any], root: int, device: Any, own_steps: int) -> None:
    """Check a root with two steps and `options`. The others have `own_steps` steps and default options."""
    net = model(RANK, device)
    optimizer = optimizer_of(name, net, options if root == RANK else {"lr": 0.9})
    steps(net, optimizer, 2 if root == RANK else own_steps, device)
    with torch.no_grad():
        hvd.broadcast_parameters(net.state_dict(), root_rank=root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    alike(net.state_dict(), hvd.broadcast_object(net.state_dict(), root))
    alike(optimizer.state_dict(), hvd.broadcast_object(optimizer.state_dict(), root))
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                assert value.device == parameter.device
    steps(net, optimizer, 2, device)  # it is usable: all ranks make the same steps
    for tensor in net.state_dict().values():
        assert torch.equal(hvd.broadcast(tensor, root), tensor)


@several
@pytest.mark.parametrize("name", sampled("state of an optimizer", list(OPTIMIZERS), 4))
def test_state_of_every_optimizer(name: str, device: Any) -> None:
    for number, options in enumerate(OPTIONS):
        for own_steps in (0, 3):
            check(name, options, (number + own_steps) % SIZE, device, own_steps)


@several
def test_list_of_named_parameters(device: Any) -> None:
    net = model(RANK, device)
    hvd.broadcast_parameters(list(net.named_parameters()), root_rank=SIZE - 1)
    for mine, root in zip(net.parameters(), model(SIZE - 1, device).parameters(), strict=True):
        assert torch.equal(mine, root)


@several
def test_nothing_is_recorded_for_gradients(device: Any) -> None:
    net = model(RANK, device)
    with torch.no_grad():
        net[0].weight.fill_(RANK)
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        result = hvd.broadcast(net[0].weight, 1)
        assert hvd.broadcast_(net[0].bias, 1) is net[0].bias
    assert net[0].weight.unique().tolist() == [1.0]
    assert net[0].weight.requires_grad
    assert not result.requires_grad


THING = {"float": 1.5, "text": "äß", "list": [1, 2.5, None], "set": {3}, "in": {"tensor": torch.arange(3)}}


def test_object() -> None:
    for root in range(SIZE):
        result = hvd.broadcast_object({**THING, "rank": RANK}, root_rank=root)
        alike(result, {**THING, "rank": root})
        assert hvd.broadcast_object(THING if root == RANK else None, root, name="named")["text"] == "äß"


@several
def test_object_in_a_process_set(halves: Any) -> None:
    mine, _ = halves
    for root in mine.ranks:
        assert hvd.broadcast_object({"rank": RANK}, root, process_set=mine) == {"rank": root}


def test_objects_of_all_ranks() -> None:
    alike(hvd.allgather_object({**THING, "rank": RANK}), [{**THING, "rank": rank} for rank in range(SIZE)])
