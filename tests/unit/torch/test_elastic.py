"""TorchState and ElasticSampler on ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from loopback_job import job
from torch import nn
from torch.utils.data import DataLoader

import ringdance.torch as hvd
from ringdance.core.engine import Engine
from ringdance.errors import CollectiveError
from ringdance.torch.elastic import (
    ElasticSampler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from ringdance.training.elastic import run_fn


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def net_of(value: float) -> nn.Linear:
    net = nn.Linear(2, 1)
    nn.init.constant_(net.weight, value)
    nn.init.constant_(net.bias, value)
    return net


def value_of(net: nn.Module) -> float:
    values = {float(value) for parameter in net.parameters() for value in parameter.detach().flatten()}
    assert len(values) == 1
    return values.pop()


def fill(net: nn.Module, value: float) -> None:
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_save_and_restore() -> None:
    net = net_of(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    state = TorchState(net, optimizer, epoch=3)
    assert (state.model, state.optimizer, state.epoch) == (net, optimizer, 3)
    step(net, optimizer)
    step(net, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    state.epoch = 4
    state.restore()
    assert (value_of(net), state.epoch) == (1.0, 3)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state  # no momentum yet
    step(net, optimizer)
    state.commit()
    step(net, optimizer)  # 1 - 0.5 = 0.5, then 0.5 - 0.5 * 1.5 = -0.25
    assert value_of(net) == -0.25
    for _ in range(2):  # continuing from the saved values does not change them
        state.restore()
        assert value_of(net) == 0.5
        step(net, optimizer)
        assert value_of(net) == -0.25
    assert state.model is net


def test_nothing_given() -> None:
    state = TorchState(epoch=1)
    assert (state.model, state.optimizer) == (None, None)
    state.save()
    state.restore()
    state.sync()


def test_assigning_another_object_tracks_and_saves_it() -> None:
    first, second = net_of(1.0), net_of(2.0)
    state = TorchState(model=first, count=1)
    state.model = second
    fill(second, 3.0)
    fill(first, 4.0)
    state.restore()
    assert state.model is second
    assert (value_of(first), value_of(second)) == (4.0, 2.0)


def test_assigning_a_model_where_there_was_none() -> None:
    state = TorchState(epoch=0)
    net = net_of(1.0)
    state.model = net
    fill(net, 2.0)
    state.restore()
    assert state.model is net
    assert value_of(net) == 1.0


def test_tensors_as_attributes() -> None:
    weight = net_of(1.0).weight
    state = TorchState(best=torch.tensor([1.0]), parts=[torch.zeros(2)], weight=weight)
    state.best += 1
    state.parts[0] += 1
    state.restore()
    assert state.best.tolist() == [1.0]
    assert state.parts[0].tolist() == [0.0, 0.0]
    assert state.weight is weight  # it belongs to a model


@pytest.mark.parametrize("wrapped", [False, True])
def test_sync(wrapped: bool) -> None:
    """All ranks take rank 0's values. Attributes are restored to what rank 0 saved last."""

    def program(engine: Engine) -> None:
        rank = engine.rank
        net = net_of(1.0 + rank)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5 + rank, momentum=0.5)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        state = TorchState(net, optimizer, sampler=ElasticSampler(range(8), shuffle=False), epoch=10 + rank)
        fill(net, 5.0 + rank)
        state.epoch = 20 + rank
        state.sampler.record_batch(0, 1 + rank)
        state.sync()
        assert (value_of(net), optimizer.param_groups[0]["lr"], state.epoch) == (5.0, 0.5, 20)
        assert state.sampler.state_dict() == {"epoch": 0, "processed_num": 2}
        assert list(state.sampler) == [[2, 4, 6], [3, 5, 7]][rank]
        state.restore()
        assert state.epoch == 10
        assert value_of(net) == 1.0 + rank  # the rank's own value; a sync must follow
        assert state.sampler.state_dict() == {"epoch": 0, "processed_num": 0}
        state.sync()
        assert (value_of(net), state.epoch) == (1.0, 10)
        assert list(state.sampler) == [[0, 2, 4, 6], [1, 3, 5, 7]][rank]

    job(2, program)


def test_a_scheduler_stays_tied_to_its_optimizer() -> None:
    def program(engine: Engine) -> None:
        net = net_of(1.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=8.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state = TorchState(net, optimizer, schedule=schedule)
        if engine.rank == 0:
            step(net, optimizer)
            schedule.step()
        state.sync()
        assert state.schedule is schedule
        step(net, optimizer)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 2.0
        state.restore()
        step(net, optimizer)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 4.0

    job(2, program)


def test_skip_sync_deals_samples_out_anew() -> None:
    """If hosts have only left, there is no sync, but the sampler must serve the remaining ranks."""
    sampler = ElasticSampler(range(8), shuffle=False)
    sampler.record_batch(0, 2)
    sampler.num_replicas, sampler.rank = 2, 1  # as for a job of two ranks
    assert list(sampler) == [1, 3, 5, 7]
    state = TorchState(sampler=sampler)
    state.on_reset()
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert list(sampler) == [2, 3, 4, 5, 6, 7]


def test_a_loader_gives_each_sample_once_though_training_is_interrupted() -> None:
    data = list(range(20))
    failures = [3, 7]
    seen: list[list[int]] = [[]]
    sampler = ElasticSampler(data, seed=3)
    loader = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    state = TorchState(sampler=sampler, epoch=0, seen=seen[0])

    def train(state: TorchState) -> None:
        while state.epoch < 2:
            for number, batch in enumerate(loader):
                if failures and len(state.seen) // 2 == failures[0]:
                    state.seen.extend([-1, -1])  # these must be forgotten
                    failures.pop(0)
                    raise CollectiveError("planted")
                state.seen.extend(batch.tolist())
                state.sampler.record_batch(number, 2)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)

    run_fn(train, lambda: None)(state)
    assert not failures
    assert sorted(state.seen[:20]) == data
    assert sorted(state.seen[20:]) == data
    assert state.seen[:20] != state.seen[20:]


def test_handlers_of_ones_own() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

    class CounterHandler(StateHandler):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count, 0)

    class Special(Counter):
        pass

    registry = get_handler_registry()
    assert [kind for kind, _ in registry[:3]] == [nn.Module, torch.optim.Optimizer, ElasticSampler]
    set_handler_registry([(Counter, CounterHandler), (Special, StateHandler), *registry])
    try:
        counter = Special()
        state = TorchState(counter=counter)
        counter.count = 5
        state.sync()
        state.restore()
        assert state.counter is counter
        assert counter.count == 0
    finally:
        set_handler_registry(registry)


@pytest.mark.parametrize("given", ["both", "model", "optimizer", "plain optimizer"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_restore_drops_the_gradients_of_the_failed_step(given: str, passes: int) -> None:
    """The loop clears gradients after each step, and Sum would not allow a second pass after the exchange."""

    def program(engine: Engine) -> list[float]:
        net = net_of(1.0)
        plain = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            plain, net.named_parameters(), op=hvd.Sum, backward_passes_per_step=passes
        )
        kept: dict[str, Any] = {"model": net, "optimizer": optimizer, "plain optimizer": plain}
        state = TorchState(net, optimizer, step=0)
        if given != "both":
            state = TorchState(**{given.split()[-1]: kept[given]}, step=0)
        failures = [1]

        def train(state: TorchState) -> None:
            while state.step < 2:
                for number in range(passes):
                    net(torch.full((1, 2), engine.rank + 1.0)).sum().backward()
                    if failures and state.step == 1 and number == 0:
                        failures.clear()
                        raise CollectiveError("planted")
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.commit()

        run_fn(train, lambda: None)(state)
        assert not failures
        return net.weight.flatten().tolist()

    right = 1.0 - 0.1 * 2 * 3 * passes  # two steps, ranks 1 and 2, and this many passes
    for weights in job(2, program):
        assert weights == pytest.approx([right, right], abs=1e-6)


def test_a_restore_lets_a_scaler_unscale_again() -> None:
    net = net_of(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = TorchState(net, optimizer, scaler=scaler)
    for _ in range(2):
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        assert net.weight.grad is not None
        assert net.weight.grad.tolist() == [[1.0, 1.0]]
        state.restore()
        assert net.weight.grad is None
