"""DistributedOptimizers created, replaced, deleted, copied, in threads: one exchange per pass, no leaks."""

from __future__ import annotations

import copy
import gc
import io
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sampled import sampled
from steps import counting_exchanges
from torch import Tensor, nn
from torch_nets import assert_equal_weights

import ringdance.torch as hvd
from ringdance.training import session

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)
SEEDS = 80
REPLACED = r"no longer reduces gradients, because another DistributedOptimizer was.*take the parameters"


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return net.double()


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    return net(torch.randn(5, 3, generator=made, dtype=torch.float64)).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def layers_of(net: nn.Module, layers: slice) -> list[nn.Module]:
    return [net[0], net[2]][layers]


@dataclass
class Trained:
    """A net with one optimizer, or one for each of two layers, and the same in one process for reference."""

    net: nn.Module
    optimizers: list[Any]
    base: torch.optim.Optimizer | None
    reference: nn.Module
    plain: list[torch.optim.Optimizer]
    op: int
    old: list[Any] = field(default_factory=list)  # replaced but still referenced
    steps: int = 0


class Program:
    """Random calls, equal on all ranks. Each of them is checked."""

    def __init__(self, seed: int) -> None:
        self.luck = random.Random(seed)
        self.made = 0
        self.trained: list[Trained] = []

    def run(self, calls: int) -> None:
        for _ in range(calls):
            kinds = ["train"] * 3 + ["make", "again", "same", "halves", "delete", "copy", "threads", "drop"]
            kind = self.luck.choice(kinds) if self.trained else "make"
            getattr(self, kind)()
        while self.trained:
            self.train()
            self.drop()

    def one(self) -> Trained:
        return self.luck.choice(self.trained)

    def optimizer_of(self, net: nn.Module, op: int, layers: slice = slice(None)) -> tuple[Any, Any]:
        base = sgd(p for layer in layers_of(net, layers) for p in layer.parameters())
        return hvd.DistributedOptimizer(base, net.named_parameters(), op=op), base

    def make(self) -> None:
        if len(self.trained) == 3:
            return self.train()
        self.made += 1
        net, reference = make_net(self.made), make_net(self.made)
        op = self.luck.choice([hvd.Average, hvd.Average, hvd.Sum])
        optimizer, base = self.optimizer_of(net, op)
        plain = [sgd(reference.parameters())]
        self.trained.append(Trained(net, [optimizer], base, reference, plain, op))

    def again(self, one: Trained | None = None) -> None:
        """Create another optimizer for the same parameters. The old one may be kept but cannot be used."""
        one = one or self.one()
        one.old = one.optimizers if self.luck.random() < 0.5 else []
        optimizer, one.base = self.optimizer_of(one.net, one.op)
        one.optimizers, one.plain = [optimizer], [sgd(one.reference.parameters())]
        for old in one.old:
            with pytest.raises(ValueError, match=REPLACED):
                self.luck.choice([old.step, old.zero_grad, old.synchronize])()

    def same(self) -> None:
        """Wrap the same torch optimizer again. Its state continues."""
        pick = self.one()
        if pick.base is not None:
            pick.old = pick.optimizers if self.luck.random() < 0.5 else []
            pick.optimizers = [hvd.DistributedOptimizer(pick.base, pick.net.named_parameters(), op=pick.op)]

    def halves(self) -> None:
        """Create an optimizer for each of two layers. Together they replace the old optimizer."""
        pick = self.one()
        pick.base, parts = None, (slice(0, 1), slice(1, 2))
        pick.optimizers = [self.optimizer_of(pick.net, pick.op, part)[0] for part in parts]
        pick.plain = [
            sgd(p for layer in layers_of(pick.reference, part) for p in layer.parameters()) for part in parts
        ]

    def delete(self) -> None:
        """Delete the optimizer. The net is then a plain one, and a single rank may run a backward pass."""
        pick = self.one()
        dead = [weakref.ref(optimizer) for optimizer in pick.optimizers]
        pick.optimizers, pick.old = [], []
        assert not any(reference() for reference in dead)
        if self.luck.randrange(SIZE) == RANK:
            with counting_exchanges() as count:
                loss_of(pick.net, 0, RANK).backward()
            assert count() == 0
        self.again(pick)

    def copy(self) -> None:
        """Copy a net. A copy does not replace anything, and the original continues to work."""
        pick = self.one()
        if len(self.trained) == 3 or len(pick.optimizers) > 1:
            return
        if self.luck.random() < 0.5:
            net, optimizer = copy.deepcopy((pick.net, pick.optimizers[0]))
        else:
            file = io.BytesIO()
            torch.save((pick.net, pick.optimizers[0]), file)
            file.seek(0)
            net, optimizer = torch.load(file, weights_only=False)
        reference, plain = copy.deepcopy((pick.reference, pick.plain))
        optimizer.zero_grad()  # joins the job, in the same order on all ranks
        self.trained.append(Trained(net, [optimizer], None, reference, plain, pick.op, steps=pick.steps))

    def drop(self) -> None:
        """Drop a net. Everything that belongs to it must be freed at once."""
        number = self.luck.randrange(len(self.trained))
        one = self.trained.pop(number)
        dead = [weakref.ref(thing) for thing in (one.net, *one.optimizers, *one.old, *one.net.parameters())]
        exchanges = [weakref.ref(optimizer._exchange) for optimizer in one.optimizers]
        assert all(reference() for reference in exchanges)
        del one
        assert not [reference() for reference in (*dead, *exchanges) if reference() is not None]

    def train(self) -> None:
        self.train_one(self.one(), self.luck.random())

    def threads(self) -> None:
        """Train two nets in parallel, or one net in a different thread than before."""
        chosen = self.luck.sample(self.trained, min(2, len(self.trained)))
        seeds = [self.luck.random() for _ in chosen]
        errors: list[BaseException] = []

        def train(one: Trained, seed: float) -> None:
            try:
                self.train_one(one, seed, counted=False)
            except BaseException as error:
                errors.append(error)

        with counting_exchanges() as count:
            before = [item.steps for item in chosen]
            threads = [threading.Thread(target=train, args=pair) for pair in zip(chosen, seeds, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        made = [(one.steps - first) * len(one.optimizers) for one, first in zip(chosen, before, strict=True)]
        assert count() == sum(made)

    def train_one(self, one: Trained, seed: float, counted: bool = True) -> None:
        luck = random.Random(seed)
        with counting_exchanges() if counted else _nothing() as count:
            steps = luck.randint(1, 7)
            for _ in range(steps):
                self.step(one, luck)
        assert not counted or count() == steps * len(one.optimizers)
        assert_equal_weights(one.net, one.reference)

    def step(self, one: Trained, luck: random.Random) -> None:
        one.steps += 1
        to_none, by_hand = luck.random() < 0.5, luck.random() < 0.3
        for optimizer in one.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        loss = loss_of(one.net, one.steps, RANK)
        if by_hand:
            parameters = list(one.net.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        else:
            loss.backward()
        if luck.random() < 0.3 and not by_hand:
            nn.utils.clip_grad_norm_(one.net.parameters(), 1e9)
        for optimizer in one.optimizers:
            optimizer.step()
        one.reference.zero_grad()
        joined: Any = sum(loss_of(one.reference, one.steps, rank) for rank in range(SIZE))
        (joined if one.op == hvd.Sum else joined / SIZE).backward()
        for plain in one.plain:
            plain.step()


class _nothing:
    def __enter__(self) -> Callable[[], int]:
        return lambda: 0

    def __exit__(self, *_: object) -> None:
        pass


@several
@pytest.mark.parametrize("seed", sampled("optimizers of torch", range(SEEDS), 5))
def test_random_programs(seed: int) -> None:
    Program(seed).run(25)


@several
def test_models_are_freed() -> None:
    """Everything that refers to a model is freed, even if the wrapped optimizer and a scheduler live on."""
    left = []
    for number in range(8):
        net = make_net(number)
        base = sgd(net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(base, 1)
        optimizer = hvd.DistributedOptimizer(base, net.named_parameters())
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, step, RANK).backward()
            optimizer.step()
            scheduler.step()
        references = [weakref.ref(optimizer), weakref.ref(optimizer._exchange), weakref.ref(optimizer._hooks)]
        del optimizer
        assert [tensor() for tensor in references] == [None] * 3
        if RANK == 0:
            with counting_exchanges() as count:
                loss_of(net, 0, RANK).backward()
                base.step()  # a plain optimizer again
            assert count() == 0
        left.append(weakref.ref(net))
        del net, base, scheduler
    gc.collect()
    assert [item() for item in left] == [None] * 8


@several
def test_an_optimizer_that_gains_parameters_of_another() -> None:
    """It takes the parameters, and the other optimizer is replaced."""
    net = make_net(0)
    first, second = [hvd.DistributedOptimizer(sgd(layer.parameters())) for layer in (net[0], net[2])]
    loss_of(net, 0, RANK).backward()
    second.add_param_group({"params": net[0].parameters()})
    with counting_exchanges() as count:
        for step in range(3):
            second.zero_grad()
            loss_of(net, step, RANK).backward()
            second.step()
    assert count() == 3
    with pytest.raises(ValueError, match=REPLACED):
        first.step()


@several
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_adasum_replaces_and_is_replaced(op: int) -> None:
    if SIZE == 3:
        pytest.skip("Adasum needs 2, 4, 8 ranks")
    net = make_net(0)
    first = hvd.DistributedOptimizer(sgd(net.parameters()), op=hvd.Average + hvd.Adasum - op)
    loss_of(net, 0, RANK).backward()
    first.zero_grad()
    second = hvd.DistributedOptimizer(sgd(net.parameters()), op=op)
    with counting_exchanges() as count:
        loss_of(net, 0, RANK).backward()
        second.step()
    assert count() == (op == hvd.Average)


@several
def test_a_group_of_the_same_ranks() -> None:
    """A process set keeps its number if torch.distributed has created a group with the same ranks."""
    engine, net = session.engine(), make_net(0)
    group = engine.add_group(9000, tuple(range(SIZE)))
    optimizer = hvd.DistributedOptimizer(sgd(net.parameters()))
    assert optimizer._exchange.set_id == hvd.global_process_set.process_set_id == 0
    hvd.barrier()
    engine.leave_group(group)


@several
def test_a_replaced_optimizer_takes_no_parameters() -> None:
    """It raises before it takes parameters from the optimizer that has them."""
    net = make_net(0)
    first, second = [hvd.DistributedOptimizer(sgd(layer.parameters())) for layer in (net[0], net[2])]
    third = hvd.DistributedOptimizer(sgd(net[0].parameters()))
    with pytest.raises(ValueError, match=REPLACED):
        first.add_param_group({"params": net[2].parameters()})
    assert len(first.param_groups) == 1
    with counting_exchanges() as count:
        loss_of(net, 0, RANK).backward()
        second.step(), third.step()
    assert count() == 2


@several
def test_a_construction_that_fails_replaces_nothing() -> None:
    net = make_net(0)
    base = sgd(net.parameters())
    optimizer = hvd.DistributedOptimizer(base, net.named_parameters())
    for value, wrong, text in (
        (sgd(net.parameters()), hvd.ProcessSet([0]), "is not registered"),
        (base, hvd.ProcessSet([0]), "is not registered"), (base, [0, 1], "must be a ProcessSet, got"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(value, net.named_parameters(), process_set=wrong)
    assert optimizer._options.process_set is hvd.global_process_set
    with counting_exchanges() as count:
        loss_of(net, 0, RANK).backward()
        optimizer.step()
    assert count() == 1


@several
def test_a_dropped_result_is_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is reported if the script keeps using the wrapped optimizer, and not otherwise."""
    net = make_net(0)
    base = sgd(net.parameters())
    hvd.DistributedOptimizer(base, net.named_parameters())
    assert len(caplog.records) == 1
    assert "for 0.weight and others was dropped before its first step" in caplog.text
    assert "Keep the returned optimizer" in caplog.text
    caplog.clear()
    used = hvd.DistributedOptimizer(base, net.named_parameters())
    loss_of(net, 0, RANK).backward()
    used.step()
    replaced = hvd.DistributedOptimizer(base, net.named_parameters())
    again = hvd.DistributedOptimizer(base, net.named_parameters())
    again.step()
    unused = hvd.DistributedOptimizer(sgd(net.parameters()))  # its wrapped optimizer is gone too
    del used, replaced, again, unused
    assert not caplog.records


@several
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("apart", [True, False], ids=["each", "both"])
def test_a_step_within_a_backward_pass(apart: bool, passes: int) -> None:
    """Gradients that a pass computes before and after a step in one of its hooks are all reduced."""
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    parts = [[first], [second]] if apart else [[first, second]]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(part, lr=1.0), backward_passes_per_step=passes)
        for part in parts
    ]
    for optimizer, part in zip(optimizers, parts, strict=True):
        seen = []

        def hook(_: Any, optimizer: Any = optimizer, seen: list[int] = seen) -> None:
            seen.append(1)
            if len(seen) % passes == 0:
                optimizer.step(), optimizer.zero_grad()

        part[0].register_post_accumulate_grad_hook(hook)
    for count in range(1, 5):
        for _ in range(passes):
            (first * (RANK + 1) + second * (RANK + 1) * 10).sum().backward()
        mean = passes * (SIZE + 1) / 2
        assert first.item() == pytest.approx(-mean * count)
        assert hvd.allgather(second.detach()).unique().numel() == 1


@several
def test_an_optimizer_is_closed() -> None:
    net = make_net(0)
    optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters())
    optimizer.close()
    with counting_exchanges() as count:
        loss_of(net, 0, RANK).backward()
    assert count() == 0
    with pytest.raises(ValueError, match="or because it was closed"):
        optimizer.step()
    later = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters())
    optimizer.close()
    with counting_exchanges() as count:
        loss_of(net, 0, RANK).backward()
        later.step()
    assert count() == 1
