"""Training with DistributedOptimizer on n ranks equals training of one process on the joined batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ringdance.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)


class Net(nn.Module):
    """An MLP with a branch that only some batches use, and one parameter that nobody uses."""

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
    """Mean over all ranks' batches: what one process would train on."""
    return sum(loss_of(net, step, rank, branch(rank)) for rank in range(SIZE)) / SIZE


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def assert_equal_weights(net: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=tolerance), name


def assert_same_on_all_ranks(net: nn.Module) -> None:
    states = hvd.allgather_object([value.detach().clone() for value in net.parameters()])
    for state in states:
        for mine, theirs in zip(states[0], state, strict=True):
            assert torch.equal(mine, theirs)


def test_fifty_steps_equal_one_process() -> None:
    net, reference = Net(), Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    plain = sgd(reference)
    for step in range(50):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        plain.step()
    assert_equal_weights(net, reference)
    assert_same_on_all_ranks(net)
    assert net.idle.grad is None  # nobody used it: no zeros, so no weight decay either


def test_clipping_as_people_write_it() -> None:
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
        assert float(norm) == pytest.approx(float(expected), abs=1e-12)
    assert_equal_weights(net, reference)


def test_a_parameter_unused_on_some_ranks_with_clipping() -> None:
    """Each step another rank leaves the branch out; in every third step nobody uses it."""
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(30):
        uses = lambda rank, step=step: step % 3 != 0 and rank != step % SIZE  # noqa: E731
        optimizer.zero_grad()
        loss_of(net, step, RANK, uses(RANK)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step, uses).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
    assert_equal_weights(net, reference)
    assert_same_on_all_ranks(net)


def test_a_rank_without_backward_takes_part_in_step() -> None:
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(6):
        optimizer.zero_grad()
        plain.zero_grad()
        idle = step % SIZE if SIZE > 1 else -1
        if idle != RANK:
            loss_of(net, step, RANK).backward()
        optimizer.step()
        (sum(loss_of(reference, step, rank) for rank in range(SIZE) if rank != idle) / SIZE).backward()
        plain.step()
    assert_equal_weights(net, reference)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_grad_scaler_with_an_inf_on_one_rank(compression: Any) -> None:
    net = Net(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), compression=compression
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    reference = Net(torch.float32)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    other = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    for step in range(8):
        bad = step in (2, 5)
        optimizer.zero_grad()
        loss = loss_of(net, step, RANK, dtype=torch.float32)
        scaler.scale(loss * float("inf") if bad and RANK == SIZE - 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        joined = sum(loss_of(reference, step, rank, dtype=torch.float32) for rank in range(SIZE)) / SIZE
        other.scale(joined * float("inf") if bad else joined).backward()
        other.unscale_(plain)
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        other.step(plain)
        other.update()
        assert scaler.get_scale() == other.get_scale()
    assert_same_on_all_ranks(net)
    assert_equal_weights(net, reference, 1e-6 if compression is hvd.Compression.none else 2e-3)


@pytest.mark.parametrize("make", [
    lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    lambda net: torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
])
def test_gradients_computed_in_a_closure_are_reduced(make: Any) -> None:
    net, reference = Net(), Net()
    del net.idle, reference.idle  # LBFGS wants a gradient for each
    del net.branch, reference.branch
    optimizer, plain = hvd.DistributedOptimizer(make(net), net.named_parameters()), make(reference)
    for step in range(4):
        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, step, RANK)
            loss.backward()
            return loss

        def joined(step: int = step) -> Any:
            plain.zero_grad()
            loss = joined_loss(reference, step)
            loss.backward()
            return loss

        optimizer.step(closure)
        plain.step(joined)
    assert_equal_weights(net, reference, 1e-10)


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
        # clipping reads reduced gradients here too
        assert float(nn.utils.clip_grad_norm_(net.parameters(), 3.0)) == pytest.approx(
            float(nn.utils.clip_grad_norm_(reference.parameters(), 3.0)), rel=1e-10
        )
        optimizer.step()
        plain.step()
    assert_equal_weights(net, reference, 1e-11)


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
    """As with a discriminator's real and fake batch: right without backward_passes_per_step."""
    net, reference = Net(), Net()
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(10):
        net.zero_grad()  # the module's: the optimizer does not hear of it
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
            of_critic.zero_grad()  # clears what the generator's pass left
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


@pytest.mark.parametrize("groups", [1, 3, "lists"])
@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_groups_and_predivide(groups: Any, predivide: float) -> None:
    """The branch misses in some steps on some ranks, so that a group has missing members."""
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
    """Gradients sent while others are computed, in several buckets; the branch is used by some."""
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
])
def test_sparse_gradients_missing_on_a_rank(overlap: bool, as_dense: bool, make: Any) -> None:
    def table() -> nn.Embedding:
        torch.manual_seed(1)
        return nn.Embedding(9, 4, sparse=True, dtype=torch.float64)

    net, reference = table(), table()
    optimizer = hvd.DistributedOptimizer(
        make(net.parameters()), net.named_parameters(), sparse_as_dense=as_dense
    )
    if SIZE > 1:
        optimizer._exchange.wants_overlap = overlap
    plain = make(reference.parameters())
    places = [torch.tensor([rank, 2, 5]) for rank in range(SIZE)]
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        idle = step % SIZE if SIZE > 1 else -1
        if idle != RANK:
            net(places[RANK]).square().sum().backward()
            assert net.weight.grad.is_sparse
        optimizer.step()
        losses = [reference(places[rank]).square().sum() for rank in range(SIZE) if rank != idle]
        (sum(losses) / SIZE).backward()
        plain.step()
    if as_dense and isinstance(plain, torch.optim.SparseAdam):
        # Rows that nobody touched are zero entries of the gradient, which SparseAdam's moments see.
        assert_same_on_all_ranks(net)
    else:
        assert_equal_weights(net, reference)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(compression: Any) -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), compression=compression)
    loss_of(net, 0, RANK).backward()
    grads = [net.first.weight.grad]
    assert grads[0].dtype is torch.float64
    if SIZE > 1:
        small = torch.float16 if compression is hvd.Compression.fp16 else torch.bfloat16
        reference = []
        for rank in range(SIZE):
            one = Net()
            loss_of(one, 0, rank).backward()
            reference.append(one.first.weight.grad.to(small).float())
        mean = torch.stack(reference).sum(0) / SIZE
        assert torch.equal(grads[0], mean.to(small).double())
    optimizer.step()
    assert_same_on_all_ranks(net)


def test_runs_are_bit_equal_in_float32() -> None:
    def run() -> list[torch.Tensor]:
        net = Net(torch.float32)
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
        for step in range(20):
            optimizer.zero_grad()
            loss_of(net, step, RANK, dtype=torch.float32).backward()
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


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
        optimizer.step()
        starts = [parameter.detach().clone() for parameter in replicas[0].parameters()]
        for rank, (replica, one) in enumerate(zip(replicas, plain, strict=True)):
            one.zero_grad()
            loss_of(replica, step, rank).backward()
            one.step()
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
    """The other way: one exchange in step(), whatever the number of passes on each rank."""
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


def test_reentrant_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    def make(dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(2)
        layers = [nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]
        return nn.Sequential(*layers).to(dtype)

    net, reference = make(), make()
    optimizer = hvd.DistributedOptimizer(
        sgd(net), net.named_parameters(), backward_passes_per_step=2, op=hvd.Sum
    )
    plain = sgd(reference)
    for step in range(5):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(2):
            x, y = data(step * 2 + part, RANK)
            inner = checkpoint(net[2], net[1](net[0](x)), use_reentrant=True)
            ((net[3](inner) - y) ** 2).mean().backward()
            (joined_loss_plain(reference, step * 2 + part) * SIZE).backward()
        optimizer.step()
        plain.step()
    assert_equal_weights(net, reference)


def joined_loss_plain(net: nn.Module, step: int) -> Any:
    losses = [((net(x) - y) ** 2).mean() for x, y in (data(step, rank) for rank in range(SIZE))]
    return sum(losses) / SIZE


def test_a_parameter_that_begins_to_need_a_gradient() -> None:
    net, reference = Net(), Net()
    for one in (net, reference):
        one.first.weight.requires_grad_(False)
    optimizer, plain = hvd.DistributedOptimizer(sgd(net), net.named_parameters()), sgd(reference)
    for step in range(8):
        if step == 3:
            net.first.weight.requires_grad_(True), reference.first.weight.requires_grad_(True)
        if step == 6:
            net.last.bias.requires_grad_(False), reference.last.bias.requires_grad_(False)
        optimizer.zero_grad()
        loss_of(net, step, RANK).backward()
        optimizer.step()
        plain.zero_grad()
        joined_loss(reference, step).backward()
        plain.step()
    assert_equal_weights(net, reference)


def test_gradients_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(net)
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    plain = sgd(reference)
    made = torch.Generator().manual_seed(1)
    images = [torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=made) for _ in range(SIZE)]
    for _ in range(3):
        optimizer.zero_grad(), plain.zero_grad()
        net(images[RANK]).square().mean().backward()
        (sum(reference(one).square().mean() for one in images) / SIZE).backward()
        optimizer.step(), plain.step()
    assert_equal_weights(net, reference)


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
            # The branch is used only when the first ranks have joined: they do not learn of it.
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
