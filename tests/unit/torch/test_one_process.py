"""Without a launcher, every collective is the identity, and training is bit-equal to plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import ringdance.torch as hvd


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_verbs_are_the_identity() -> None:
    x = torch.randn(4, 3)
    for result in (
        hvd.allreduce(x), hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.broadcast(x, 0),
        hvd.alltoall(x), hvd.reducescatter(x), hvd.grouped_allreduce([x])[0],
        hvd.allreduce(x, op=hvd.Adasum),
    ):
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert hvd.allreduce_(x) is x
    assert hvd.join() == 0
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.barrier()


def test_a_snapshot_is_of_the_same_types_and_does_not_change() -> None:
    class Pair(NamedTuple):
        tensor: torch.Tensor
        step: int

    tensor = torch.ones(2)
    pair, made = Pair(tensor, 3), torch.sort(tensor)
    state = {"a": [tensor, 1], "b": (tensor,), "c": pair, "d": tensor.shape, "e": made}
    copied = hvd.snapshot(state)
    tensor.zero_()
    assert [type(value) for value in copied.values()] == [type(value) for value in state.values()]
    assert (copied["c"].step, copied["d"], copied["a"][1]) == (3, (2,), 1)
    for copied_tensor in (copied["a"][0], copied["b"][0], copied["c"].tensor, copied["e"].values):
        assert copied_tensor.tolist() == [1, 1]


def test_a_checkpoint_is_a_file_of_torch_save_and_the_same_each_time(tmp_path: Path) -> None:
    saved, state = hvd.Checkpoints(tmp_path), {"weight": torch.ones(2)}
    contents = []
    for _ in range(2):
        saved.save(1, lambda path: torch.save(state, path))
        contents.append(saved.read())
    assert contents[0] == contents[1]
    assert torch.equal(torch.load(tmp_path / "checkpoint-00000001")["weight"], state["weight"])
    saved.close()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Adasum])
def test_training_is_bit_equal(op: int) -> None:
    def train(distributed: bool) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), hvd.SyncBatchNorm(8) if distributed else nn.BatchNorm1d(8))
        optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), op=op)
            hvd.broadcast_parameters(net.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(10):
            optimizer.zero_grad()
            net(torch.randn(6, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
        return net

    for mine, plain in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_arguments_of_the_optimizer() -> None:
    net = nn.Linear(2, 2)
    named = list(net.named_parameters())

    def make(parameters: object = named, **options: object) -> object:
        return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), parameters, **options)

    for parameters, options in [
        ([("a", net.weight), ("a", net.bias)], {}),
        ([("a", net.weight)], {}),
        ([net.weight, net.bias], {}),
        (net, {}),
        (net.named_parameters, {}),
        (net.state_dict(), {}),
        ([(0, net.weight), (1, net.bias)], {}),
        (named, dict(groups=0)),
        (named, dict(groups="all")),
        (named, dict(groups=[["a"]])),
        (named, dict(groups=[[net.weight], [net.weight]])),
        (named, dict(op=hvd.Sum, gradient_predivide_factor=2.0)),
        (named, dict(backward_passes_per_step=0)),
        (named, dict(op=9)),
    ]:
        with pytest.raises(ValueError):
            make(parameters, **options)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        make(num_groups=2)
    optimizer = make([*named, ("more", nn.Parameter(torch.ones(1)))])
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)  # type: ignore[arg-type]
    for wrong in (net, net.parameters(), net.named_parameters(), None):
        with pytest.raises(ValueError, match=r"needs an optimizer, such as.*, but got"):
            hvd.DistributedOptimizer(wrong)  # type: ignore[arg-type]


def test_not_initialized() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.is_homogeneous, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"init\(\)"):
            call()
    hvd.init()


def test_process_sets_of_init() -> None:
    hvd.shutdown()
    with pytest.raises(ValueError, match="already exists"):
        hvd.init(process_sets=[hvd.ProcessSet([0])])  # equal to the global process set
    with pytest.raises(ValueError, match="dynamic"):
        hvd.init(process_sets="static")
    hvd.init(process_sets="dynamic")
    for wrong in (["a"], [0, 0], [-1]):
        with pytest.raises(ValueError):
            hvd.ProcessSet(wrong)


def test_tensors_that_cannot_be_sent() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.ones(3).to(dtype)
        with pytest.raises(ValueError, match=r"tensor\.to\(torch\.bfloat16\).*view\(torch\.uint8\)"):
            hvd.allreduce(tensor)
        moved = hvd.broadcast(tensor.view(torch.uint8), 0).view(dtype)
        assert torch.equal(moved.float(), tensor.float())
    meta = nn.Linear(2, 2, device="meta")
    for call in (lambda: hvd.allreduce(meta.weight), lambda: hvd.allreduce_(meta.bias.detach())):
        with pytest.raises(ValueError, match=r"meta tensor .* no data.*to_empty"):
            call()


def test_sync_batch_norm_converts_a_model() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None, affine=False))
        return nn.Sequential(
            inner, nn.SyncBatchNorm(3, eps=0.1), nn.BatchNorm1d(3, track_running_stats=False)
        )

    plain = make()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(make().double())
    assert [isinstance(module, hvd.SyncBatchNorm) for module in converted.modules()].count(True) == 3
    again = hvd.SyncBatchNorm.convert_sync_batchnorm(converted)
    assert again[1] is converted[1]
    assert list(converted.state_dict()) == list(plain.state_dict())
    x = torch.randn(6, 4)
    for _ in range(2):
        assert torch.allclose(converted(x.double()).float(), plain(x), atol=1e-5)
    assert not hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3).eval()).training
