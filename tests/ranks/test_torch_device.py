"""Gradients that stay on their device. Here gloo reduces CPU tensors, on the code path of GPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_settings import other_settings

import ringdance.torch as hvd
from ringdance.errors import MismatchError
from ringdance.training import session

BY_HOST = {"RINGDANCE_GPU_OPERATIONS": "mpi"}  # for GPU tensors, if benchmarks/gpu_check.py runs this
BY_GLOO = {"RINGDANCE_CPU_OPERATIONS": "gloo", "RINGDANCE_OVERLAP": "on"}
STEPS = 14
pytestmark = pytest.mark.ranks(2, 3)
hvd.init()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(300, 900), torch.nn.Linear(900, 300)
        self.extra = torch.nn.Linear(300, 300)

    def forward(self, x: torch.Tensor, extra: bool = False) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return self.extra(y) if extra else y


def train(body: Callable[[Net, Any, int], None], **options: Any) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the weights after some steps, and per step whether buckets were launched without a round."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    direct = []
    for step in range(STEPS):
        body(net, optimizer, step)
        direct.append(optimizer._exchange.direct)
    return [parameter.detach().clone() for parameter in net.parameters()], direct


def batch(step: int) -> torch.Tensor:
    made = torch.Generator(torch.empty(0).device)  # the default device: benchmarks/gpu_check.py sets it
    return torch.randn(4, 300, generator=made.manual_seed(100 * step + hvd.rank()))


def plain(net: Net, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    net(batch(step)).square().mean().backward()
    optimizer.step()


def sometimes_more(net: Net, optimizer: Any, step: int) -> None:
    """In two steps, rank 0 has gradients that the others do not have."""
    optimizer.zero_grad()
    net(batch(step), extra=step in (6, 12) and hvd.rank() == 0).square().mean().backward()
    optimizer.step()


def sometimes_again(net: Net, optimizer: Any, step: int) -> None:
    """A backward pass of rank 0 fails after some buckets, and is repeated with other data."""
    optimizer.zero_grad()
    if step == 9 and hvd.rank() == 0:
        loss = net(torch.ones(4, 300))

        def fail(_: Any) -> None:
            raise ArithmeticError("in the middle of the pass")

        hook = net.first.weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss.sum().backward()
        hook.remove()
        optimizer.zero_grad()
    net(batch(step)).square().mean().backward()
    optimizer.step()


def clipped(net: Net, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    net(batch(step)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    if step % 3 == 0:  # by hand, as some scripts do
        for parameter in net.first.parameters():
            parameter.grad = parameter.grad * 0.5
    optimizer.step()


def joining(net: Net, optimizer: Any, step: int) -> None:
    """Rank 0 runs out of data early."""
    if step < 10 or hvd.rank():
        plain(net, optimizer, step)
    elif step == 10:
        hvd.join()
    if step == STEPS - 1 and hvd.rank():
        hvd.join()


def failing(net: Net, optimizer: Any, step: int) -> None:
    """In one step, rank 0 lacks the memory to launch its second bucket, and repeats the pass."""
    source = optimizer._exchange.source if optimizer._exchange.direct else None
    if step == 9 and hvd.rank() == 0 and source is not None:
        launch, calls = source.launch, []

        def fail(call: Any, indices: Any) -> Any:
            calls.append(indices)
            if len(calls) == 2:
                raise MemoryError("no room for a flat tensor")
            return launch(call, indices)

        source.launch = fail
        optimizer.zero_grad()
        with pytest.raises(MemoryError):
            net(torch.ones(4, 300)).sum().backward()
        source.launch = launch
    plain(net, optimizer, step)


def joining_soon(net: Net, optimizer: Any, step: int) -> None:
    """Rank 0 runs out of data before buckets are launched without a round."""
    if step == 1 and hvd.rank() == 0:
        hvd.join()
    elif step < 1 or hvd.rank():
        plain(net, optimizer, step)
    if step == STEPS - 1 and hvd.rank():
        hvd.join()


def in_two_passes(net: Net, optimizer: Any, step: int) -> None:
    """The second of two passes has gradients that the first one lacks."""
    optimizer.zero_grad()
    for part in range(2):
        net(batch(2 * step + part), extra=part == 1).square().mean().backward()
    optimizer.step()


BODIES = {item.__name__: item for item in (
    plain, sometimes_more, sometimes_again, clipped, joining, failing, joining_soon, in_two_passes,
)}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.bf16}], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", BODIES)
def test_weights_are_those_of_the_exchange_by_the_host(name: str, options: dict[str, Any]) -> None:
    options = {**options, "backward_passes_per_step": 2 if name == "in_two_passes" else 1}
    if "compression" in options and name not in ("plain", "sometimes_more"):
        pytest.skip("covered by other cases")
    with other_settings(BY_HOST):
        expected, never = train(BODIES[name], **options)
    with other_settings(BY_GLOO):
        result, direct = train(BODIES[name], **options)
        devices = session.engine().sets.find(0).state.exchange.devices
        assert len(devices) > (name != "joining_soon"), "buckets went through torch's communicators"
    assert not any(never)
    assert any(direct) or name == "joining_soon", "they were launched without a round"
    if name in ("sometimes_more", "sometimes_again", "failing"):
        assert False in direct[direct.index(True) :], "with rounds after other gradients"
    if name.startswith("joining") and hvd.rank() == 0:
        return  # it stopped early, so its weights are old
    for actual, other in zip(result, expected, strict=True):
        if hvd.size() == 2:
            assert torch.equal(actual, other)
        else:  # gloo sums three ranks in another order
            near = {"rtol": 1e-4, "atol": 1e-5}
            if "compression" in options:
                near = {"rtol": 1e-2, "atol": 1e-3}
            torch.testing.assert_close(actual, other, **near)


def in_direct_mode() -> tuple[Net, Any]:
    """Return a model and its optimizer, whose buckets are launched without a round."""
    net = Net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for step in range(8):
        plain(net, optimizer, step)
    assert optimizer._exchange.direct
    return net, optimizer


def test_the_same_optimizer_in_a_job_that_starts_again() -> None:
    with other_settings(BY_GLOO):
        net, optimizer = in_direct_mode()
        hvd.shutdown()
        hvd.init()
        for step in range(8):
            plain(net, optimizer, step)
        assert optimizer._exchange.direct
        total = sum(float(parameter.detach().sum()) for parameter in net.parameters())
        assert hvd.allgather_object(total) == [total] * hvd.size()


def test_gradients_of_another_type_on_one_rank() -> None:
    with other_settings(BY_GLOO):
        net, optimizer = in_direct_mode()
        optimizer.zero_grad()
        kind = torch.bfloat16 if hvd.rank() == 0 else torch.float32
        loss = net.to(kind)(batch(8).to(kind)).square().mean()
        with pytest.raises(MismatchError, match=r"element types.*bfloat16 on rank 0"):
            loss.backward()


def test_parameters_that_are_added_on_one_rank_only() -> None:
    with other_settings(BY_GLOO):
        (net, optimizer), more = in_direct_mode(), torch.nn.Parameter(torch.ones(3))
        if hvd.rank() == 0:
            optimizer.add_param_group({"params": [more]})
        with pytest.raises(MismatchError, match="different parameters"):
            plain(net, optimizer, 8)


def test_a_tensor_on_another_kind_of_device_is_a_mismatch() -> None:
    """As if one rank's tensor were on a GPU. Here, only the host supports the scale of its integers."""
    with other_settings(BY_GLOO):
        tensor = torch.ones(3) if hvd.rank() == 0 else torch.ones(3, dtype=torch.bool)
        with pytest.raises(MismatchError, match="host memory"):
            hvd.allreduce(tensor, op=hvd.Sum, name="mixed")
        assert hvd.allreduce(torch.ones(3), name="mixed").tolist() == [1.0] * 3
