"""Elastic training on real ranks continues from the last commit as if there had been no error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringdance.torch as hvd
from ringdance.errors import CollectiveError, EngineError, MismatchError
from ringdance.torch.elastic import ElasticSampler, TorchState, run
from ringdance.training import elastic, session

pytestmark = pytest.mark.limit(180)

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
STEPS, COMMIT_EVERY = 12, 4


def mismatch() -> None:
    """Raise on all ranks. The engine still works afterwards."""
    if SIZE == 1:
        raise MismatchError("planted")
    hvd.allreduce(torch.ones(1 + RANK), name="planted")


def on_one_rank() -> None:
    """Raise on one rank. The others notice when that rank leaves the job."""
    if RANK == SIZE - 1:
        raise CollectiveError("planted on one rank")


def broken_engine() -> None:
    """Break one rank's engine. After that, the ranks cannot agree on anything."""
    if RANK == 0:
        engine = session.engine()
        engine._exclusively(engine.end.fail, EngineError("planted in the engine"))
    hvd.allreduce(torch.ones(2), name="after that")


def in_flight() -> None:
    """Raise while some operations have not even started."""
    for number in range(5):
        hvd.allreduce_async(torch.ones(1000), name=f"in flight {RANK} {number}")
    raise CollectiveError("planted")


Failures = dict[int, Callable[[], None]]


class Training:
    """Twelve steps with momentum, committed every fourth. After some of them, an error is raised once."""

    def __init__(
        self, failures: Failures, make: Callable[[Any], torch.optim.Optimizer], **options: Any
    ) -> None:
        torch.manual_seed(1 + RANK)  # all ranks must adopt rank 0's weights
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = hvd.DistributedOptimizer(make(net.parameters()), net.named_parameters(), **options)
        self.state = TorchState(net, optimizer, step=0, losses=[])
        self.failures = dict(failures)
        self.committed = [value.clone() for value in net.state_dict().values()]
        self.starts: list[int] = []
        self.told: list[tuple[str, int]] = []
        self.state.register_reset_callbacks([lambda: self.told.append(("first", hvd.size()))])
        self.state.register_reset_callbacks([lambda: self.told.append(("second", hvd.rank()))])
        run(self.train)(self.state)

    def train(self, state: TorchState) -> None:
        net, optimizer = state.model, state.optimizer
        self.starts.append(state.step)
        if len(self.starts) > 1:
            committed = hvd.broadcast_object(self.committed, 0)
            for now, then in zip(net.state_dict().values(), committed, strict=True):
                assert torch.equal(now, then)
        while state.step < STEPS:
            made = torch.Generator().manual_seed(100 * state.step + RANK)
            optimizer.zero_grad()
            loss = net(torch.randn(3, 4, generator=made)).square().mean()
            loss.backward()
            optimizer.step()
            state.losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
            state.step += 1
            if state.step in self.failures:
                self.failures.pop(state.step)()
            if state.step % COMMIT_EVERY == 0:
                self.committed = [value.clone() for value in net.state_dict().values()]
                state.commit()

    def weights(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.state.model.parameters()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


@pytest.mark.parametrize(
    ("failure", "make", "options"),
    [
        (mismatch, sgd, {}),
        (on_one_rank, adam, {}),
        (broken_engine, sgd, {}),
        (in_flight, adam, {}),
        (mismatch, sgd, {"op": hvd.Sum, "groups": 2}),
        (broken_engine, adam, {"reduce_in_backward": False}),
    ],
)
def test_training_ends_as_if_nothing_had_happened(
    failure: Callable[[], None], make: Callable[[Any], torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    if failure is broken_engine and SIZE == 1:
        pytest.skip("one process has nothing to agree on")
    undisturbed = Training({}, make, **options)
    training = Training({6: failure, 8: failure, 11: failure}, make, **options)
    assert undisturbed.starts == [0]
    if failure is on_one_rank and SIZE > 1:
        # The others had saved step 8 when they received the second error. All follow rank 0.
        assert training.starts == [0, 4, 8, 8]
    else:
        assert training.starts == [0, 4, 4, 8]
    assert training.told == [("first", SIZE), ("second", RANK)] * 3
    assert not undisturbed.told
    assert training.state.losses == undisturbed.state.losses
    for mine, theirs in zip(training.weights(), undisturbed.weights(), strict=True):
        assert torch.equal(mine, theirs)
    everywhere = hvd.allgather_object(training.weights())
    assert all(torch.equal(a, b) for other in everywhere for a, b in zip(everywhere[0], other, strict=True))


def test_an_error_before_the_first_commit() -> None:
    """All ranks return to rank 0's initial weights."""
    training, undisturbed = Training({1: mismatch}, adam), Training({}, adam)
    assert training.starts == [0, 0]
    for mine, theirs in zip(training.weights(), undisturbed.weights(), strict=True):
        assert torch.equal(mine, theirs)


def test_overlap_goes_on_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGDANCE_OVERLAP", "on")
    elastic.restart()
    try:
        training, undisturbed = Training({6: mismatch, 9: mismatch}, sgd), Training({}, sgd)
        assert training.starts == [0, 4, 8]
        for mine, theirs in zip(training.weights(), undisturbed.weights(), strict=True):
            assert torch.equal(mine, theirs)
    finally:
        monkeypatch.undo()
        elastic.restart()


@pytest.mark.parametrize("length", [24, 25, 4 * SIZE + 1])
def test_every_sample_once_in_each_epoch(length: int) -> None:
    """After errors in mid-epoch, committed samples count. Only the padding occurs twice."""
    data = [1000 + index for index in range(length)]
    sampler = ElasticSampler(data, seed=5)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    state = TorchState(sampler=sampler, epoch=0, batches=0, seen=[[], []])
    errors = [1, 3, 4]  # batches completed before each error
    states: list[tuple[int, int]] = []

    @run
    def train(state: TorchState) -> None:
        states.append((sampler.epoch, sampler.processed_num))
        while state.epoch < 2:
            for number, batch in enumerate(loader):
                everywhere = hvd.allgather_object(batch.tolist())
                state.seen[state.epoch].extend(value for of_rank in everywhere for value in of_rank)
                sampler.record_batch(number, len(batch))
                state.batches += 1
                if errors and state.batches == errors[0] + 1:
                    errors.pop(0)
                    mismatch()  # this batch is not committed
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    assert not errors
    assert len(states) == 4
    assert states[1] == (0, 2 * SIZE)
    for seen in state.seen:
        assert sorted(set(seen)) == data
        assert len(seen) - length < SIZE


def test_without_errors_the_order_is_known() -> None:
    order = list(range(4 * SIZE))
    random.Random(7).shuffle(order)
    sampler = ElasticSampler(range(4 * SIZE), seed=4)
    sampler.set_epoch(3)
    assert list(sampler) == order[RANK::SIZE]
