"""DistributedOptimizer as an object: what it wraps, old idioms, Adasum, process sets, join."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import counting_steps
from torch import nn
from torch_nets import Net, assert_equal_weights, assert_same_on_all_ranks, data, joined_loss, loss_of, sgd
from warned import warned

import ringdance.torch as hvd
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)


def test_two_optimizers_as_in_a_gan() -> None:
    def train(make: Callable[[Any], Any], loss: Callable[..., Any]) -> tuple[nn.Module, nn.Module]:
        generator, critic = Net(seed=5), nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            critic.weight.fill_(0.3), critic.bias.fill_(-0.1)
        of_generator, of_critic = make(generator), make(critic)
        for step in range(8):
            of_generator.zero_grad()
            loss(lambda x: critic(generator(x)).square().mean(), step).backward()
            of_generator.step()
            of_critic.zero_grad()  # clears the gradients of the generator's pass
            loss(lambda x: (critic(generator(x).detach()) - 1).square().mean(), step).backward()
            of_critic.step()
        return generator, critic

    mine = train(
        lambda net: hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
        ),
        lambda of, step: of(data(step, RANK)[0]),
    )
    theirs = train(
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        lambda of, step: sum(of(data(step, rank)[0]) for rank in range(SIZE)) / SIZE,
    )
    for net, reference in zip(mine, theirs, strict=True):
        assert_equal_weights(net, reference)


@several
@pytest.mark.parametrize(
    ("seed", "broadcast_at", "says"), [(0, -1, 0), (RANK, -1, 1), (RANK, 0, 0), (RANK, 1, 0), (RANK, 3, 1)]
)
def test_weights_that_differ_are_noticed(seed: int, broadcast_at: int, says: int) -> None:
    """One rank reports them once, in the second step. Dropout and batch norm statistics may differ."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    torch.manual_seed(100 + RANK)
    with warned() as texts:
        for step in range(8):
            if step == broadcast_at:
                hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            optimizer.zero_grad()
            net(torch.randn(4, 9)).sum().backward()
            optimizer.step()
    assert len(texts) == (says if RANK == 0 else 0)
    if texts:
        assert re.search(r"an element of '0.weight' is \S+ on rank 0 \(.*\) and \S+ on rank \d", texts[0])
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in texts[0]
        assert "hvd.broadcast_optimizer_state(optimizer, root_rank=0)" in texts[0]
        assert "learning rate and other optimizer options" in texts[0]


class Unreadable(nn.Parameter):
    """Like a quantized weight, on which some operations fail."""

    def is_floating_point(self) -> bool:
        raise NotImplementedError


NAN, INF = float("nan"), float("inf")


@several
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("first", "second", "kind", "says"),
    [
        (0.0, NAN, nn.Parameter, "0 on rank 0 (.*) and nan on rank 1"), (NAN, NAN, nn.Parameter, ""),
        (INF, -INF, nn.Parameter, "inf on rank 0 (.*) and -inf on rank 1"), (INF, INF, nn.Parameter, ""),
        (1.0, 1e300, nn.Parameter, "1 on rank 0 (.*) and inf on rank 1"), (1.0, 2.0, Unreadable, ""),
    ],
)
def test_weights_of_any_kind_are_compared(first: float, second: float, kind: Any, says: str) -> None:
    """Non-contiguous weights are compared. One that a rank cannot read is skipped, and the others are not."""
    value = torch.full((3, 70), 1.0, dtype=torch.float64).t()
    value[-1] = second if RANK == 1 else first
    odd, plain = (kind if RANK == 1 else nn.Parameter)(value), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([odd, plain], lr=0.1), named_parameters=[("odd", odd), ("plain", plain)]
    )
    with warned() as texts:
        for step in range(12):
            if step == 4 and kind is Unreadable and RANK == 1:
                plain.data += 1
            ((odd * 0).sum() + (plain * 0).sum()).backward()
            optimizer.step()
    message = says and f"'odd' is {says}"
    if kind is Unreadable:
        message = "'plain' is 1 on rank 0 (.*) and 2 on rank 1"
    assert len(texts) == (RANK == 0 and message != "")
    assert all(re.search(message.replace("(.*)", r"\(.*\)"), text) for text in texts)


@several
@pytest.mark.parametrize("differ", [False, True])
def test_weights_are_compared_once_where_ranks_join_after_each_step(differ: bool) -> None:
    """Other ranks have no step before the first join."""
    torch.manual_seed(RANK * differ)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters())
    with warned() as texts:
        for parts in ([0, 1] if RANK == 0 else [], [0], [1], [0], [1]):
            for last in parts:
                optimizer.zero_grad()
                net[: last + 1](torch.ones(4, 3)).sum().backward()
                optimizer.step()
            hvd.join()
    assert len(texts) == (RANK == 0 and differ)


@several
@pytest.mark.parametrize(
    ("change", "says"),
    [("none", ""), ("reload", "0.weight"), ("add", "parameter 4, of shape (1, 2)"), ("unfreeze", "2.bias")],
)
def test_weights_that_differ_later_are_noticed(change: str, says: str) -> None:
    """Reported once: in exchange 10, and soon after new parameters appear. Frozen parameters may differ."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    net[2].bias.requires_grad_(False).fill_(RANK)
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    with warned() as texts:
        for step in range(100 if change == "reload" else 8):
            if step == 4 and change == "reload" and RANK == 0:
                with torch.no_grad():
                    net[0].weight.add_(1)
            elif step == 4 and change == "add":
                torch.manual_seed(RANK)
                net.append(nn.Linear(2, 1, bias=False))
                optimizer.add_param_group({"params": net[3].parameters()})
            elif step == 4 and change == "unfreeze":
                net[2].bias.requires_grad_(True)
            optimizer.zero_grad()
            net(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    assert len(texts) == (RANK == 0 and says != "")
    assert all(f"an element of '{says}' is" in text for text in texts)


@pytest.mark.parametrize("early", [True, False])
def test_a_parameter_that_takes_the_place_of_another_is_reduced(early: bool) -> None:
    """This happens when a model grows. The number of parameters stays equal."""
    points = nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([points], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, [("points", points)], reduce_in_backward=early)
    for grown in (False, True, True):
        if grown:
            points = nn.Parameter(torch.cat([points.detach(), torch.zeros(2)]))
            optimizer.param_groups[0]["params"][0] = points
        optimizer.zero_grad()
        (points * (RANK + 1.0)).sum().backward()
        optimizer.step()
    mean = (SIZE + 1) / 2
    assert points.tolist() == [-3 * mean] * 3 + [-2 * mean] * 2 + [-mean] * 2


@several
def test_weights_are_compared_though_ranks_join() -> None:
    """Ranks join after different numbers of steps per epoch, with optimizers of all ranks and of some."""
    some = hvd.add_process_set([0, 1]) if SIZE > 2 else hvd.global_process_set
    nets = [Net(), Net()]
    every, two = [
        hvd.DistributedOptimizer(sgd(net), net.named_parameters(), process_set=ranks)
        for net, ranks in zip(nets, (hvd.global_process_set, some), strict=True)
    ]
    for _ in range(3):
        for step in range(1 + 2 * RANK):
            every.zero_grad()
            loss_of(nets[0], step, RANK).backward()
            every.step()
        hvd.join()
        for step in range(2):
            two.zero_grad()
            loss_of(nets[1], step, RANK).backward()
            two.step()
    if SIZE > 2:
        hvd.remove_process_set(some)


@several
def test_a_mismatch_names_the_parameter() -> None:
    net = nn.Sequential(nn.Linear(9, 5 + (RANK == 0)), nn.LazyLinear(1))
    net(torch.zeros(2, 9))
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    with pytest.raises(MismatchError, match=r"Mismatched shapes for '0.weight': \(6, 9\) on rank 0 on host"):
        net(torch.ones(4, 9)).sum().backward()
    optimizer.zero_grad()


def test_names_of_parameters() -> None:
    """Names are unique and equal on all ranks, as scripts written for Horovod expect."""
    net = Net()
    named = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    assert named._parameter_names == {value: name for name, value in net.named_parameters()}
    groups = [{"params": [parameter]} for parameter in Net().parameters()]
    for op in (hvd.Average, hvd.Adasum):
        names = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), op=op)._parameter_names.values()
        assert len(set(names)) == len(groups)
        assert hvd.allgather_object(list(names)) == [list(names)] * SIZE


def test_adasum_optimizer() -> None:
    if SIZE == 3:
        net = Net()
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), op=hvd.Adasum)
        loss_of(net, 0, RANK).backward()
        with pytest.raises(NotImplementedError, match="2, 4, 8"):
            optimizer.step()
        return

    def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
        return (1 - (dot / (2 * aa) if aa else 0)) * a + (1 - (dot / (2 * bb) if bb else 0)) * b

    net = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.01), net.named_parameters(), op=hvd.Adasum
    )
    replicas = [Net() for _ in range(SIZE)]
    plain = [torch.optim.Adam(replica.parameters(), lr=0.01) for replica in replicas]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        with counting_steps() as steps:
            optimizer.step()
            assert steps() == 1
        starts = [parameter.detach().clone() for parameter in replicas[0].parameters()]
        for rank, (replica, item) in enumerate(zip(replicas, plain, strict=True)):
            item.zero_grad()
            loss_of(replica, step, rank).backward()
            item.step()
        for place, parameters in enumerate(zip(*[replica.parameters() for replica in replicas], strict=True)):
            changes = [parameter.detach() - starts[place] for parameter in parameters]
            while len(changes) > 1:
                changes = [combine(a, b) for a, b in zip(changes[::2], changes[1::2], strict=True)]
            for parameter in parameters:
                parameter.data.copy_(starts[place] + changes[0])
    assert_equal_weights(net, replicas[0], 1e-10)


def test_a_process_set_trains_alone() -> None:
    if SIZE < 3:
        pytest.skip("for 3 or more ranks")
    pair = hvd.add_process_set([0, 2])
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), process_set=pair)
    reference = Net()
    plain = sgd(reference)
    together = [0, 2] if pair.included() else [RANK]
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
        plain.zero_grad()
        (sum(loss_of(reference, step, rank) for rank in together) / len(together)).backward()
        plain.step()
    assert_equal_weights(net, reference)
    assert hvd.remove_process_set(pair)


def test_the_wrapped_optimizer() -> None:
    net = Net()
    base = sgd(net)
    loss_of(net, 0, 0).backward()
    base.step()
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base, net.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer).__module__ == "ringdance.torch.optimizer"
    assert "momentum_buffer" in optimizer.state[net.first.weight]
    assert optimizer.state is base.state
    optimizer.zero_grad(set_to_none=False)
    loss_of(net, 1, RANK).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_on_all_ranks(net)


def test_the_old_idiom_with_synchronize() -> None:
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
    assert_equal_weights(net, reference)
    if SIZE > 1:
        loss_of(net, 9, RANK).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize") as seen:
            optimizer.step()
        assert len(seen) == 1


@several
@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_after_a_join(overlap: bool) -> None:
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    optimizer._exchange.wants_overlap = overlap
    plain = sgd(reference)
    for steps in (3, 5):
        for step in range(steps + RANK):
            optimizer.zero_grad()
            # The branch is used only after the first ranks have joined, which do not learn about it.
            loss_of(net, step, RANK, step >= steps).backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(net.state_dict(), SIZE - 1)
        hvd.broadcast_optimizer_state(optimizer, SIZE - 1)
        assert 0 <= last < SIZE
        for step in range(steps + SIZE - 1):
            at_work = [rank for rank in range(SIZE) if step < steps + rank]
            plain.zero_grad()
            (sum(loss_of(reference, step, rank, step >= steps) for rank in at_work) / SIZE).backward()
            plain.step()
        assert_equal_weights(net, reference)
