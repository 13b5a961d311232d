"""A DistributedOptimizer on two loopback ranks: added parameters, nested or failed passes, copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from loopback_job import job
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdance.torch as hvd
from ringdance.core.engine import Engine
from ringdance.errors import MismatchError
from ringdance.torch import _private, batch_norm

torch.manual_seed(0)
_NETS = nn.Linear(3, 4), nn.Linear(4, 2)


def nets() -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(_NETS)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for net in modules for p in net.parameters()], lr=0.05, momentum=0.9)


def train(optimizer: Any, loss: Callable[[Tensor], Tensor], steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(batch(step, rank)).backward()
        optimizer.step()


def train_on_mean(optimizer: Any, loss: Callable[[Tensor], Tensor], steps: range) -> None:
    """Do in one process what two ranks do together."""
    for step in steps:
        optimizer.zero_grad()
        ((loss(batch(step, 0)) + loss(batch(step, 1))) / 2).backward()
        optimizer.step()


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def values(*modules: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for net in modules for p in net.parameters()]


@pytest.mark.parametrize("when", [0, 1, 8])  # by step 8, the ranks exchange without masks
@pytest.mark.parametrize("how", ["named", "numbered", "by the wrapped optimizer", "adasum"])
def test_add_param_group(when: int, how: str) -> None:
    def program(engine: Engine) -> list[Tensor]:
        body, head = nets()
        base = sgd(head)
        named = [*head.named_parameters(prefix="head"), *body.named_parameters(prefix="body")]
        optimizer = hvd.DistributedOptimizer(
            base, named if how == "named" else None, op=hvd.Adasum if how == "adasum" else hvd.Average
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        loss = lambda x: head(body(x)).square().mean()  # noqa: E731
        train(optimizer, loss, range(when), engine.rank)
        if when:
            scheduler.step()
        group = {"params": list(body.parameters()), "lr": 0.01}
        (base if how.startswith("by") else optimizer).add_param_group(group)
        name = "body.weight" if how == "named" else "allreduce.noname.1.0"
        assert how.startswith("by") or optimizer._options.names[2] == name
        train(optimizer, loss, range(when, when + 5), engine.rank)
        return values(body, head)

    results = job(2, program)
    assert_close(results[0], results[1])
    if how == "adasum":
        return
    body, head = nets()
    optimizer = sgd(head)
    loss = lambda x: head(body(x)).square().mean()  # noqa: E731
    train_on_mean(optimizer, loss, range(when))
    optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.01})
    train_on_mean(optimizer, loss, range(when, when + 5))
    assert_close(results[0], values(body, head))


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("wrong", ["none", "other"])
def test_a_rank_that_adds_no_or_other_parameters(steps: int, wrong: str) -> None:
    """All ranks get the error at once. If they all add the parameters in the end, training continues."""

    def program(engine: Engine) -> list[Tensor]:
        body, head = nets()
        other = nn.Linear(3, 4)
        named = [*nn.ModuleDict({"head": head, "body": body, "other": other}).named_parameters()]
        optimizer = hvd.DistributedOptimizer(sgd(head), named)
        loss = lambda x: head(body(x) + 0 * other(x)).square().mean()  # noqa: E731
        train(optimizer, loss, range(steps), engine.rank)
        if engine.rank == 0:
            optimizer.add_param_group({"params": list(body.parameters())})
        elif wrong == "other":
            optimizer.add_param_group({"params": list(other.parameters())})
        with pytest.raises(MismatchError, match=r"different parameters.*add_param_group\(\) on all ranks"):
            train(optimizer, loss, range(1), engine.rank)
        if engine.rank == 1 and wrong == "none":
            optimizer.add_param_group({"params": list(body.parameters())})
        if wrong == "none":
            train(optimizer, loss, range(3), engine.rank)
        return values(body, head)

    results = job(2, program)
    if wrong == "none":
        assert_close(*results)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_parameters_added_with_gradients(op: int) -> None:
    """Between backward and step, the gradients of added parameters are reduced before they are used."""

    def program(engine: Engine) -> list[Tensor]:
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(head), op=op)
        head(body(batch(0, engine.rank))).square().mean().backward()
        optimizer.add_param_group({"params": list(body.parameters())})
        optimizer.step()
        return values(body, head)

    results = job(2, program)
    assert_close(*results)


def nothing(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    return head(body(x))


def everything(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    return checkpoint(lambda y: head(body(y)), x, use_reentrant=True)


def some(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    return head(checkpoint(body, x, use_reentrant=True))


def each(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    return checkpoint(head, checkpoint(body, x * 1.0, use_reentrant=True), use_reentrant=True)


def nested(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(lambda z: checkpoint(body, z, use_reentrant=True), y, use_reentrant=True)

    return checkpoint(lambda y: head(inner(y)), x, use_reentrant=True)


class Recompute(torch.autograd.Function):
    """Checkpointing as libraries implement it themselves."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(gradient)
        return None, x.grad


def own(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    return Recompute.apply(lambda y: head(body(y)), x)


@pytest.mark.parametrize("forward", [nothing, everything, some, each, nested, own])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_reentrant_checkpoints(forward: Any, op: int) -> None:
    """Gradients are reduced when backward returns, wherever they are computed, and no list grows."""

    def program(engine: Engine) -> None:
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(body, head), op=op)
        for step in range(6):
            optimizer.zero_grad()
            forward(batch(step, engine.rank).requires_grad_(), body, head).square().mean().backward()
            assert optimizer._exchange.finished
            assert optimizer._exchange.state.passes == 1
            reduced = [parameter.grad.clone() for parameter in optimizer._options.parameters]
            plain = copy.deepcopy((body, head))
            for rank in range(2):
                loss = plain[1](plain[0](batch(step, rank))).square().mean()
                (loss if op == hvd.Sum else loss / 2).backward()
            assert_close(reduced, [p.grad for net in plain for p in net.parameters()])
            optimizer.step()
            assert not optimizer._hooks._tasks

    job(2, program)


@pytest.mark.parametrize("forward", [nothing, everything, nested])
def test_a_pass_that_fails(forward: Any) -> None:
    """After a user's hook raised in a pass, the next step is right, also on the same graph's leaves."""

    def program(engine: Engine) -> list[Tensor]:
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(body, head))
        x = batch(0, engine.rank).requires_grad_()

        def fail(_: Tensor) -> None:
            raise KeyError("the user's")

        handle = body.weight.register_hook(fail)
        with pytest.raises(KeyError, match="the user's"):
            forward(x, body, head).sum().backward()
        handle.remove()
        x.sum().backward()  # a pass without any of the parameters
        assert optimizer._exchange.state.passes == 0
        for _ in range(2):
            optimizer.zero_grad()
            forward(x, body, head).square().mean().backward()
            assert optimizer._exchange.finished
            optimizer.step()
        assert not optimizer._hooks._tasks
        return values(body, head)

    assert_close(*job(2, program))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_copy_trains(how: str, op: int) -> None:
    """A copy has its own parameters, state and options, and continues like its original."""

    def program(engine: Engine) -> None:
        net = nn.Sequential(*nets())
        optimizer = hvd.DistributedOptimizer(
            sgd(net), net.named_parameters(), op=op, groups=None if op == hvd.Adasum else 2
        )
        calls = []
        train(optimizer, lambda x: net(x).square().mean(), range(4), engine.rank)
        before = values(net)
        if how == "deepcopy":
            other, copied = copy.deepcopy((net, optimizer))
        else:
            file = io.BytesIO()
            torch.save((net, optimizer), file)
            file.seek(0)
            other, copied = torch.load(file, weights_only=False)
        if engine.rank == 0:
            copy.deepcopy(copied)  # unused; what only one rank does changes nothing
        assert type(copied) is type(optimizer)
        copied.register_step_pre_hook(lambda *_: calls.append(1))
        loss = other(batch(4, engine.rank)).square().mean()
        loss.backward()  # before the optimizer is used for the first time
        copied.step()
        assert calls == [1]
        train(copied, lambda x: other(x).square().mean(), range(5, 9), engine.rank)
        assert_close(values(net), before)
        train(optimizer, lambda x: net(x).square().mean(), range(4, 9), engine.rank)
        assert_close(values(net), values(other))
        for copied_state, original_state in zip(copied.state.values(), optimizer.state.values(), strict=True):
            assert_close([copied_state["momentum_buffer"]], [original_state["momentum_buffer"]])

    job(2, program)


def test_a_saved_optimizer_without_a_job() -> None:
    """An optimizer saved by ranks of a process set is a plain optimizer if there is no job."""

    def program(engine: Engine) -> bytes:
        alone = hvd.add_process_set([1])
        net = nn.Sequential(*nets())
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), process_set=alone)
        file = io.BytesIO()
        torch.save((net, optimizer), file)
        copied = copy.deepcopy(optimizer)
        assert copied._options.process_set is alone
        copied.step()
        return file.getvalue()

    saved = job(2, program)[0]
    net, optimizer = torch.load(io.BytesIO(saved), weights_only=False)
    reference = nn.Sequential(*nets())
    train(optimizer, lambda x: net(x).square().mean(), range(3), 0)
    plain = sgd(reference)
    train(plain, lambda x: reference(x).square().mean(), range(3), 0)
    assert_close(values(net), values(reference))

    def elsewhere(engine: Engine) -> None:
        net, optimizer = torch.load(io.BytesIO(saved), weights_only=False)
        with pytest.raises(KeyError, match=r"ranks \[1\].*add_process_set"):
            train(optimizer, lambda x: net(x).square().mean(), range(1), engine.rank)
        hvd.add_process_set([1])
        train(optimizer, lambda x: net(x).square().mean(), range(1), engine.rank)

    job(2, elsewhere)


def test_a_model_with_the_sync_batch_norm_of_torch() -> None:
    def program(engine: Engine) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
        hvd.DistributedOptimizer(sgd(net), net.named_parameters())

    with pytest.warns(UserWarning, match=r"convert_sync_batchnorm\(model\)"):
        job(2, program)


def test_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch does not report the end of a pass, an error suggests another way, which works."""

    def program(engine: Engine) -> list[Tensor]:
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(body, head))
        loss = lambda x: everything(x.requires_grad_(), body, head).square().mean()  # noqa: E731
        train(optimizer, loss, range(3), engine.rank)
        return values(body, head)

    def step_only(engine: Engine) -> list[Tensor]:
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(body, head))
        with pytest.raises(ValueError, match=r"compiled_autograd = False.*reduce_in_backward=False"):
            train(optimizer, lambda x: head(body(x)).sum(), range(1), engine.rank)
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(body, head), reduce_in_backward=False)
        train(optimizer, lambda x: head(body(x)).square().mean(), range(3), engine.rank)
        return values(body, head)

    expected = job(2, program)[0]
    with monkeypatch.context() as patch:
        patch.setattr(_private, "_RUNS_BACKWARD", frozenset())
        assert_close(job(2, program)[0], expected)
    for name, value in (("_queue_callback", None), ("graph_task", lambda: -1)):
        with monkeypatch.context() as patch:
            patch.setattr(_private, name, value)
            assert_close(job(2, step_only)[0], expected)


def test_sparse_entries_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal entries are summed, as the public names require."""
    tensor = torch.sparse_coo_tensor([[2, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=False)
    indices, entries = _private.sparse_entries(tensor)
    assert (indices.tolist(), entries.tolist()) == ([[2, 0, 2]], [1.0, 2.0, 3.0])
    monkeypatch.setattr(_private, "hasattr", lambda *_: False, raising=False)
    indices, entries = _private.sparse_entries(tensor)
    assert (indices.tolist(), entries.tolist()) == ([[0, 2]], [2.0, 4.0])


def test_batch_norms_without_their_private_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm1d and PyTorch's SyncBatchNorm are converted, and other modules stay as they are."""
    monkeypatch.setattr(batch_norm, "BatchNorm", nn.BatchNorm1d)
    net = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.BatchNorm2d(2))
    kinds = [type(module) for module in hvd.SyncBatchNorm.convert_sync_batchnorm(net)]
    assert kinds == [hvd.SyncBatchNorm, hvd.SyncBatchNorm, nn.BatchNorm2d]


def test_sharded_parameters_without_their_mark() -> None:
    """FSDP 1 marks parameters with a private attribute. Parameters without it count as plain ones."""
    parameter = nn.Parameter(torch.ones(2))
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]
    assert _private.divided_by(parameter) == "FullyShardedDataParallel"
    del parameter._fsdp_flattened  # type: ignore[attr-defined]
    assert _private.divided_by(parameter) is None


def test_steps_without_private_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues, but a scheduler created before the optimizer may warn."""
    for name in ("note_step", "counts_steps", "hooks_run_inside"):
        monkeypatch.setattr(_private, name, lambda _: None)

    def program(engine: Engine) -> list[Tensor]:
        body, head = nets()
        optimizer = hvd.DistributedOptimizer(sgd(body, head))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(optimizer, lambda x: head(body(x)).square().mean(), range(2), engine.rank)
        scheduler.step()
        return values(body, head)

    first, second = job(2, program)
    assert_close(first, second)


def test_parameters_divided_by_torch_distributed() -> None:
    """FSDP and DTensor raise an error at once that says what to do instead."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        mesh = init_device_mesh("cpu", (1,))
        models = [nn.Sequential(*nets()) for _ in range(3)]
        fully_shard(models[0], mesh=mesh)
        cpu = torch.device("cpu")
        models[1:] = [
            FullyShardedDataParallel(net, use_orig_params=orig, device_id=cpu)
            for net, orig in zip(models[1:], (True, False), strict=True)
        ]

        def program(engine: Engine) -> None:
            for net in models:
                with pytest.raises(ValueError, match=r"sharded across processes by.*the plain optimizer"):
                    hvd.DistributedOptimizer(sgd(net), net.named_parameters())
            weight = next(models[0].parameters())
            for call in (hvd.allreduce, hvd.allreduce_):
                with pytest.raises(ValueError, match=r"tensor\.to_local\(\).*tensor\.full_tensor\(\)"):
                    call(weight.detach())
            hvd.allreduce_(weight.detach().to_local())

        job(2, program)
    finally:
        distributed.destroy_process_group()
