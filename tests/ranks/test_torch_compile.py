"""torch.compile around collectives, models and whole steps gives the same results as eager code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from steps import counting_steps
from torch import Tensor, nn
from torch_nets import data, sgd

import ringdance.torch

ringdance.torch.init()
RANK, SIZE = ringdance.torch.rank(), ringdance.torch.size()
BACKEND = "aot_eager"  # needs no compiler
several = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


slow = pytest.mark.slow


@pytest.fixture(params=["marked code", pytest.param("wrappers", marks=slow)])
def hvd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the binding, either as it is or as it works if torch lacks the private names for marking code."""
    if request.param == "marked code":
        yield ringdance.torch
        return
    known = {name: module for name, module in sys.modules.items() if name.startswith("ringdance.torch")}
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("ringdance.torch")
    for name in [name for name in sys.modules if name.startswith("ringdance.torch")]:
        del sys.modules[name]
    sys.modules.update(known)
    ringdance.torch = known["ringdance.torch"]  # type: ignore[misc]


def calls(hvd: Any) -> dict[str, Callable[[Tensor], Any]]:
    return {
        "allreduce": lambda x: hvd.allreduce(x * 2, name="a") + 1,
        "allreduce_": lambda x: hvd.allreduce_(x * 3, op=hvd.Sum) - 1,
        "grouped_allreduce": lambda x: sum(hvd.grouped_allreduce([x, x * 2], name="g")),
        "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([x * 2, x * 3])[1] * 2,
        "allreduce_async": lambda x: hvd.synchronize(hvd.allreduce_async(x * 2)) + 1,
        "allgather": lambda x: hvd.allgather(x[None] * 2).sum(0),
        "broadcast": lambda x: hvd.broadcast(x * 2, SIZE - 1) + x,
        "broadcast_": lambda x: hvd.broadcast_(x * 2, 0) + x,
        "alltoall": lambda x: hvd.alltoall((x * 2).repeat(SIZE)) + 1,
        "reducescatter": lambda x: hvd.reducescatter((x * 2).repeat(SIZE)) + 1,
        "allgather_object": lambda x: x + sum(hvd.allgather_object(hvd.rank())),
        "barrier": lambda x: (hvd.barrier(), x * 2)[1],
        "mark_step": lambda x: (hvd.mark_step(), x * 2)[1],
    }


@pytest.mark.parametrize("names", [
    ("allreduce", "grouped_allreduce_", "allreduce_async", "mark_step"), pytest.param(None, marks=slow)
])
def test_collectives_in_a_compiled_function(hvd: Any, names: tuple[str, ...] | None) -> None:
    every = calls(hvd)
    lengths = (3, 3) if names else (3, 3, 5)
    for name in names or every:
        compiled = torch.compile(every[name], backend="eager")
        with counting_steps() as steps:
            for length in lengths:
                x = torch.arange(float(length)) + RANK
                assert torch.equal(compiled(x), every[name](x)), name
            assert steps() == 2 * len(lengths) * (name == "mark_step")


def test_gradients_of_a_compiled_collective(hvd: Any) -> None:
    def loss(weight: Tensor) -> Tensor:
        return (hvd.allreduce(weight * 2, name="l") * torch.arange(3.0)).sum()

    def gradient(of: Any) -> Tensor:
        weight = nn.Parameter(torch.ones(3) * (RANK + 1))
        of(weight).backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(torch.compile(loss, backend=BACKEND)), gradient(loss))


def test_one_graph_is_refused_with_the_reason_of_torch(hvd: Any) -> None:
    place = torch.compile(lambda x: x * hvd.size() + hvd.rank(), backend="eager", fullgraph=True)
    assert torch.equal(place(torch.ones(2)), torch.full((2,), float(SIZE + RANK)))
    call = torch.compile(lambda x: hvd.allreduce(x * 2) + 1, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        call(torch.ones(2))


def train(hvd: Any, what: str, compiled: bool, **options: Any) -> list[Tensor]:
    """Return the gradient norms that clipping sees, the averaged losses, and the weights."""
    torch.manual_seed(0)
    net: nn.Module = nn.Linear(7, 3, dtype=torch.float64)
    if what == "model":
        net = nn.Sequential(net, hvd.SyncBatchNorm(3).double(), nn.ReLU())
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **options)
    model = torch.compile(net, backend=BACKEND) if compiled and what == "model" else net
    norms = []

    def backward(loss: Tensor) -> None:
        loss.backward()

    if compiled and what == "backward":
        backward = torch.compile(backward, backend=BACKEND)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        backward(loss)
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
        return hvd.allreduce(loss.detach(), name="loss")

    if compiled and what == "step":
        step = torch.compile(step, backend=BACKEND)
    losses = [step(*data(number, RANK)) for number in range(3)]
    return [*norms, *losses, *net.state_dict().values()]


@pytest.mark.parametrize("what", ["model", "step"])
def test_training(hvd: Any, what: str) -> None:
    for mine, plain in zip(train(hvd, what, True), train(hvd, what, False), strict=True):
        assert torch.equal(mine, plain)


@several
@pytest.mark.slow
def test_compiled_autograd() -> None:
    """Compiled autograd does not report the end of a pass. Following the error's advice works."""
    hvd = ringdance.torch
    with torch._dynamo.config.patch(compiled_autograd=True):
        with pytest.raises(ValueError, match=r"compiled_autograd = False.*reduce_in_backward=False"):
            train(hvd, "backward", True)
        torch._dynamo.reset()
        mine = train(hvd, "backward", True, reduce_in_backward=False)
    plain = train(hvd, "backward", False, reduce_in_backward=False)
    assert all(torch.equal(*pair) for pair in zip(mine, plain, strict=True))
