"""The backend "ringdance" of torch.distributed: results equal gloo's bit by bit, if gloo supports the call.

Also run under torchrun, where gloo connects the ranks: tests/dropin/test_torch_backend.py.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sampled import sampled
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import ringdance.torch as hvd
from ringdance.core.process_sets.registry import FIRST_GROUP
from ringdance.errors import ArgumentError, MismatchError, ProcessSetRemovedError
from ringdance.torch import backend
from ringdance.torch.backend import works
from ringdance.training import session
from ringdance.training.torch_entry_point import register

register()
if "TORCHELASTIC_RUN_ID" in os.environ:  # under torchrun
    if hosts := os.environ.get("HOSTS_OF_RANKS"):
        from ringdance.torch.backend import gloo

        gloo.host_and = lambda _: hosts.split()[int(os.environ["RANK"])]
    dist.init_process_group("ringdance")
else:
    hvd.init()
    path = hvd.broadcast_object(os.path.join(tempfile.mkdtemp(), "store") if hvd.rank() == 0 else None)
    store = dist.FileStore(path, hvd.size())
    dist.init_process_group("ringdance", store=store, rank=hvd.rank(), world_size=hvd.size())
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo") if SIZE > 1 else None
pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]
WORLD = dist.group.WORLD
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
    torch.uint8,
]  # fmt: skip
EVERY_DAY = (torch.float32, torch.bfloat16)


def given(shape: Any, dtype: torch.dtype = torch.float32, rank: int = RANK) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * rank + len(str(shape)))
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def by_both(call: Callable[[Any], Any], tolerance: float = 1e-5) -> None:
    """Compare a call's results in our group and in gloo's. gloo adds three ranks in another order."""
    tolerance = 0.0 if SIZE == 2 else tolerance
    for actual, other in zip(call(WORLD), call(GLOO), strict=True):
        torch.testing.assert_close(actual, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", sampled("reductions", DTYPES, 2, EVERY_DAY), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 2)], ids=str)
def test_reductions(dtype: torch.dtype, shape: Any) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        def reduce(group: Any, op: Any = op) -> list[torch.Tensor]:
            first, other = given(shape, dtype), given(shape, dtype)
            dist.all_reduce(first, op, group=group)
            dist.reduce(other, SIZE - 1, op, group=group)
            return [first, other] if RANK == SIZE - 1 else [first]

        by_both(reduce)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_moving(dtype: torch.dtype) -> None:
    """If gloo does not support a type, results are compared with the ranks' inputs."""
    def everyone(shape: Any) -> list[torch.Tensor]:
        return [given(shape, dtype, rank) for rank in range(SIZE)]

    def equal(found: Any, wanted: Any) -> None:
        for actual, other in zip(found, wanted, strict=True):
            assert torch.equal(actual.view(torch.uint8), other.contiguous().view(torch.uint8))

    tensor = given((3, 2), dtype)
    dist.broadcast(tensor, SIZE - 1)
    equal([tensor], everyone((3, 2))[-1:])
    parts = [torch.empty(3, 2, dtype=dtype) for _ in range(SIZE)]
    dist.all_gather(parts, given((3, 2), dtype))
    equal(parts, everyone((3, 2)))
    whole = torch.empty(3 * SIZE, 2, dtype=dtype)
    dist.all_gather_into_tensor(whole, given((3, 2), dtype))
    equal([whole], [torch.cat(everyone((3, 2)))])
    dist.all_to_all_single(whole, given((3 * SIZE, 2), dtype))
    rows = [value.view(SIZE, 3, 2)[RANK] for value in everyone((3 * SIZE, 2))]
    equal([whole], [torch.cat(rows)])
    gathered = [torch.empty(4, dtype=dtype) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(given((4,), dtype), gathered, dst=1)
    if gathered is not None:
        equal(gathered, everyone((4,)))
    scattered = torch.empty(4, dtype=dtype)
    dist.scatter(scattered, everyone((4,)) if RANK == 1 else None, src=1)
    equal([scattered], [everyone((4,))[RANK]])


def test_rows_of_unequal_number() -> None:
    sends = [[(source + 2 * target) % 4 for target in range(SIZE)] for source in range(SIZE)]
    receives = [row[RANK] for row in sends]

    def exchange(group: Any) -> list[torch.Tensor]:
        output = torch.empty(sum(receives), 3)
        dist.all_to_all_single(output, given((sum(sends[RANK]), 3)), receives, sends[RANK], group=group)
        return [output]

    by_both(exchange)
    parts = [torch.empty(count, 3) for count in receives]
    dist.all_to_all(parts, list(given((sum(sends[RANK]), 3)).split(sends[RANK])))
    assert torch.equal(torch.cat(parts), exchange(GLOO)[0])
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        outputs = []
        for group in (WORLD, GLOO):
            outputs.append(torch.empty(4))
            dist.reduce_scatter(outputs[-1], list(given((4 * SIZE,)).split(4)), op, group=group)
        assert torch.equal(*outputs)
    uneven = torch.empty(RANK + 1)
    dist.reduce_scatter(uneven, [torch.full((rank + 1,), RANK + 1.0) for rank in range(SIZE)])
    assert uneven.tolist() == [SIZE * (SIZE + 1) / 2] * (RANK + 1)


def test_reductions_that_gloo_lacks() -> None:
    tensor = given((4,), torch.float32)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor, torch.stack([given((4,), rank=rank) for rank in range(SIZE)]).mean(0))
    output = torch.empty(2)
    dist.reduce_scatter_tensor(output, given((2 * SIZE,)), dist.ReduceOp.AVG)
    every = torch.stack([given((2 * SIZE,), rank=rank) for rank in range(SIZE)])
    assert torch.equal(output, every.mean(0)[2 * RANK :][:2])


def test_memory_of_any_layout() -> None:
    """Outputs may be non-contiguous, and inputs may be part of outputs, as in FSDP."""
    tensor = torch.zeros(4, 3).t()
    tensor += RANK + 1
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3, 4), SIZE * (SIZE + 1) / 2))
    whole = torch.zeros(SIZE * 2)
    whole[2 * RANK :][:2] = RANK
    dist.all_gather_into_tensor(whole, whole[2 * RANK :][:2])
    assert whole.tolist() == [float(rank) for rank in range(SIZE) for _ in (0, 1)]
    shifted = torch.arange(2.0 * SIZE)
    dist.reduce_scatter_tensor(shifted[:2], shifted)
    assert shifted[:2].tolist() == [SIZE * (2.0 * RANK), SIZE * (2.0 * RANK + 1)]


def test_calls_in_flight() -> None:
    tensors = [torch.full((3,), float(RANK + i)) for i in range(20)]
    started = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [item.get_future() for item in started[::3]]
    doubled = [future.then(lambda done: done.value()[0] * 2) for future in futures]
    for number, value in reversed(list(enumerate(started))):
        assert value.wait()
        assert value.is_completed()
        assert value.is_success()
        assert value.exception() is None
        assert torch.equal(value.result()[0], tensors[number])
        assert tensors[number][0] == sum(range(SIZE)) + SIZE * number
    assert [item.wait()[0].item() for item in doubled] == [2 * tensors[i][0].item() for i in range(0, 20, 3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for value in tensors[:4]:
            dist.all_reduce(value)
    manager.wait()
    assert [one[0].item() for one in tensors[:4]] == [SIZE * (sum(range(SIZE)) + SIZE * i) for i in range(4)]
    dist.barrier()
    results: list[Any] = [None] * SIZE
    dist.all_gather_object(results, {"rank": RANK})
    assert results == [{"rank": rank} for rank in range(SIZE)]


def test_results_are_there_without_a_wait() -> None:
    """The engine completes a call even if its work is dropped. C++ may wait for work that Python dropped."""
    turned = torch.ones(4, 3).t()
    dist.all_reduce(turned, async_op=True)
    until = time.monotonic() + 10
    while turned[0, 0] != SIZE and time.monotonic() < until:
        time.sleep(1e-3)
    assert torch.equal(turned, torch.full((3, 4), float(SIZE)))
    with functional.allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(tensor := torch.ones(4), async_op=True)
    assert torch.ops._c10d_functional.wait_tensor(tensor).tolist() == [SIZE] * 4

    def joined(group: Any, equal_share: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group)
        optimizer = SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=equal_share):
            for _ in range(2 + 2 * RANK):
                optimizer.zero_grad()
                model(torch.full((4, 3), RANK + 1.0)).sum().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for equal_share in (True, False):
        by_both(lambda group, equal_share=equal_share: joined(group, equal_share))


def test_two_ranks() -> None:
    ahead, behind = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = [dist.isend(torch.full((1000,), float(RANK + tag)), ahead, tag=tag) for tag in (1, 0)]
    for tag in (0, 1):
        received = torch.empty(1000)
        assert dist.recv(received, behind, tag=tag) == behind
        assert received[0] == behind + tag
    for tensor in sent:
        tensor.wait()
    if RANK:
        dist.send(torch.tensor([RANK]), 0)
    else:
        number = torch.zeros(1, dtype=torch.int64)
        assert sorted(dist.recv(number) for _ in range(SIZE - 1)) == list(range(1, SIZE))
    dist.barrier()  # the next messages could be received from any rank, too
    for _ in range(20):  # the future's thread and this one test the same message
        twice = dist.irecv(torch.zeros(1), behind)
        twice.get_future()
        dist.send(torch.ones(1).expand(4)[:1], ahead)
        while not twice.is_completed():
            pass
        twice.wait()
    pending = dist.irecv(late := torch.zeros(2), behind).get_future()
    dist.isend(torch.full((2,), RANK + 1.0), ahead).get_future().wait()
    assert pending.wait()[0].tolist() == late.tolist() == [behind + 1.0] * 2
    dist.barrier()
    got = torch.zeros(2)
    pair = [dist.P2POp(dist.isend, torch.ones(2), ahead), dist.P2POp(dist.irecv, got, behind)]
    for tensor in dist.batch_isend_irecv(pair):
        tensor.wait()
    assert got.tolist() == [1, 1]


def test_groups() -> None:
    """All ranks or only members may create a group. Two threads use two groups in different orders."""
    # torch names groups created only by members after the number of groups that a rank is in.
    whole = [dist.new_group(use_local_synchronization=local) for local in (True, False)]
    pair = dist.new_group([0, SIZE - 1])
    if RANK in (0, SIZE - 1):
        tensor = torch.tensor([float(RANK)])
        dist.all_reduce(tensor, group=pair)
        dist.broadcast(tensor, SIZE - 1, group=pair)
        assert tensor.item() == SIZE - 1
    totals: dict[int, float] = {}

    def reduce(number: int) -> None:
        for _ in range(10):
            first = torch.ones(2) * (number + 1)
            dist.all_reduce(first, group=whole[number])
            totals[number] = first[0].item()

    threads = [threading.Thread(target=reduce, args=(number,)) for number in (range(2) if RANK else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == {0: SIZE, 1: 2 * SIZE}
    alone = dist.new_group([RANK], use_local_synchronization=True)
    dist.all_reduce(tensor := torch.ones(1), group=alone)
    assert tensor.item() == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE  # together with the other API
    assert sorted(hvd.add_process_set([0, 1]).ranks or ()) == [0, 1] if SIZE > 2 else True


def test_groups_that_are_destroyed() -> None:
    """Destroying groups frees their memory, and other groups continue."""
    known = len(session.engine().sets.registered)
    for _ in range(20):
        group = dist.new_group(list(range(SIZE)))
        dist.all_reduce(tensor := torch.ones(1000), group=group)
        dist.destroy_process_group(group)
        assert tensor[0] == SIZE
    until = time.monotonic() + 10
    while len(session.engine().sets.registered) > known and time.monotonic() < until:
        time.sleep(0.01)
    assert len(session.engine().sets.registered) == known
    if SIZE > 1:
        with pytest.raises(ValueError, match="ascending"):
            dist.new_group([*range(SIZE)][::-1], sort_ranks=False)
    dist.barrier()


def test_groups_that_one_rank_destroys() -> None:
    """Other ranks' calls that rank 0 never makes fail immediately, and calls that all have made complete."""
    group, first = dist.new_group(timeout=timedelta(seconds=20)), torch.ones(3)
    dist.all_reduce(first, group=group)
    last = dist.all_reduce(both := torch.ones(3), group=group, async_op=True)
    if RANK == 0:
        dist.isend(torch.full((3,), 7.0), SIZE - 1, group=group)
        dist.destroy_process_group(group)
    if RANK == SIZE - 1:  # with three ranks, one does not make any call
        for _ in range(2):
            with pytest.raises(ProcessSetRemovedError, match=r"rank 0 on host .* destroyed process group"):
                dist.all_reduce(first, group=group)
        with pytest.raises(ProcessSetRemovedError, match=r"24 bytes from rank 0 to rank .*has destroyed"):
            dist.recv(torch.empty(6), 0, tag=1, group=group)
        dist.recv(first, 0, group=group)
        assert first.tolist() == [7, 7, 7]
    last.wait()
    assert both[0] == SIZE
    dist.barrier()
    if RANK:
        dist.destroy_process_group(group)
    with pytest.raises(ArgumentError, match=rf"of {SIZE} ranks was destroyed .*Create the group again"):
        group.allreduce([first])


def test_numbers_of_groups() -> None:
    """Numbers are freed with their groups and equal on all members, even if torch reuses a name."""
    engine, numbers = session.engine(), []
    first = set(engine.process_sets())
    local = SIZE == 2  # on more, ranks differ in their number of groups, which is part of torch's names
    for _ in range(3):
        for rank in range(SIZE):
            alone = dist.new_group([rank])
            if rank == RANK:
                dist.destroy_process_group(alone)
        time.sleep(0.02 * (RANK == 0))
        group = dist.new_group(list(range(SIZE)), use_local_synchronization=local)
        numbers.append(group._set_id)
        dist.all_reduce(tensor := torch.ones(3), group=group)
        dist.destroy_process_group(group)
        assert tensor[0] == SIZE
        until = time.monotonic() + 10
        while set(engine.process_sets()) - first and time.monotonic() < until:
            time.sleep(0.01)
        assert not set(engine.process_sets()) - first
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, numbers)
    assert everyone == [numbers] * SIZE
    # All numbers have been used once. The next ones are numbers that no member uses.
    root, kept = WORLD._options.store, dist.new_group()
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    most = 2 * FIRST_GROUP
    for start, want in ((kept._set_id, range(kept._set_id + 1, most)), (2 * most - 1, [most - 1])):
        if RANK == 0:
            root.add("ringdance/groups", start - FIRST_GROUP - root.add("ringdance/groups", 0))
        dist.barrier()
        group = dist.new_group()
        assert group._set_id in want
        dist.all_reduce(tensor := torch.ones(3), group=group)
        assert tensor[0] == SIZE
        dist.destroy_process_group(group)
    dist.destroy_process_group(kept)


def test_a_group_of_a_job_that_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group, engine = dist.new_group(), session.engine()
    again = SimpleNamespace(identity=engine.identity, size=SIZE, closed=False)
    with monkeypatch.context() as patch:
        patch.setattr(session, "engine", lambda: again)
        with pytest.raises(ArgumentError, match=r"before shutdown\(\) and init\(\).*Create the group again"):
            group.allreduce([torch.ones(3)])
    dist.destroy_process_group(group)


def test_a_group_whose_call_took_longer_than_its_timeout() -> None:
    """The group fails on all members, its memory is not written later, and other groups continue."""
    group, message = dist.new_group(), dist.new_group()
    for made in (group, message):
        made.set_timeout(timedelta(seconds=0.3))
    tensor = torch.full((2,), RANK + 1.0)
    if RANK == 0:
        with pytest.raises(dist.DistBackendError, match=r"within 0\.3 s .* its group has failed"):
            dist.all_reduce(tensor, group=group)
    else:
        time.sleep(0.8)
        with pytest.raises(ProcessSetRemovedError, match=r"on rank 0 .* within 0\.3 s"):
            dist.all_reduce(tensor, group=group)
    for _ in range(2):
        with pytest.raises(ProcessSetRemovedError, match="on rank 0"):
            dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [RANK + 1.0] * 2
    by_gloo = "TORCHELASTIC_RUN_ID" in os.environ  # gloo's thread would wait in C++ when the process exits
    if RANK == 0 and not by_gloo:
        with pytest.raises(dist.DistBackendError, match=r"message of 8 bytes .* its group has failed"):
            dist.recv(tensor, SIZE - 1, group=message)
    dist.all_reduce(tensor)  # the job continues
    assert tensor[0].item() == sum(range(1, SIZE + 1))
    if not by_gloo:
        with pytest.raises(ProcessSetRemovedError, match="message of 8 bytes"):
            dist.all_reduce(tensor, group=message)
    if RANK:
        dist.destroy_process_group(group)
    else:
        until = time.monotonic() + 10
        while group._number in session.engine().sets.registered and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(ArgumentError, match="freed after a call in it had timed out"):
            dist.all_reduce(tensor, group=group)  # another group may have the number by now
    wide = torch.ones(1).expand(4) if RANK == 0 else torch.zeros(4)
    dist.broadcast(wide, 0)  # the root's tensor need not be writable
    assert wide.tolist() == [1.0] * 4


def test_a_group_that_a_member_makes_too_late() -> None:
    """All members raise. Afterwards the group can be created."""
    time.sleep(1.0 * (RANK == 0))
    with pytest.raises(dist.DistStoreError, match=r"not all .* members called it within"):
        dist.new_group(timeout=timedelta(seconds=0.3))
    dist.all_reduce(tensor := torch.ones(1), group=dist.new_group())
    assert tensor.item() == SIZE


def test_numbers_without_dimensions_match_those_with_one() -> None:
    dist.all_reduce(first := torch.ones(()) if RANK == 0 else torch.ones(1))
    assert first.item() == SIZE


def net() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))


def trained(group: Any, hook: str = "", no_sync: bool = False, **options: Any) -> list[torch.Tensor]:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * RANK  # differences that DistributedDataParallel removes
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001, **options)
    if hook == "half":
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook:
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + RANK))
        with wrapped.no_sync() if no_sync and step % 2 else contextlib.nullcontext():
            wrapped(x).square().mean().backward()
        if not no_sync or step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [item.detach() for item in model.state_dict().values()]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True},
    {"no_sync": True}, {"hook": "half"}, {"hook": "power"},
], ids=str)  # fmt: skip
def test_data_parallel(options: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "_overlaps", lambda engine: overlap)
    if options.get("hook") != "power":
        by_both(lambda group: trained(group, **options), 1e-2 if "hook" in options else 1e-5)
        return
    result = hvd.allgather_object([one.tolist() for one in trained(WORLD, **options)[:2]])  # gloo aborts here
    assert result == [result[0]] * SIZE


def test_a_mismatch_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the error unchanged, and the group can be used again."""
    monkeypatch.setattr(works, "_overlaps", lambda engine: False)
    model = DistributedDataParallel(net())
    loss = model(torch.ones(2, 16)).sum()
    if RANK == 0:
        started = dist.all_reduce(torch.ones(3), async_op=True)
        loss.backward()
        with pytest.raises(MismatchError, match=r"\(3,\) on rank 0"):
            started.wait()
    else:
        with pytest.raises(MismatchError, match=r"\(3,\) on rank 0"):
            loss.backward()
        dist.all_reduce(torch.zeros(sum(parameter.numel() for parameter in model.parameters())))


def test_sparse_gradients_and_passes_within_others() -> None:
    def train(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        table = torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        model = torch.nn.ModuleList([table, *layers])

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                x = layers[0](table(ids))
                return layers[2](checkpoint(layers[1], x, use_reentrant=True))

        wrapped = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=1e-5)
        optimizer = SGD(model.parameters(), lr=0.01)
        for step in range(4):
            ids = torch.randint(0, 20, (5, 3), generator=torch.Generator().manual_seed(10 * step + RANK))
            wrapped(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    by_both(train)


def sharded(mesh: Any) -> list[torch.Tensor]:
    model = net()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + RANK))
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


def test_sharded_data_parallel() -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    meshes = {WORLD: init_device_mesh("cpu", (SIZE,)), GLOO: DeviceMesh.from_group(GLOO, "cpu")}
    by_both(lambda group: sharded(meshes[group]))


def test_the_first_fsdp_and_checkpoints_in_the_background(tmp_path_factory: Any) -> None:
    """Storages are resized, which Tensor.numpy() would forbid, and torch looks up a CPU backend."""
    from torch.distributed.checkpoint import async_save
    from torch.distributed.fsdp import FullyShardedDataParallel

    def train(group: Any) -> list[torch.Tensor]:
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(net(), process_group=group, device_id=cpu)
        optimizer = SGD(model.parameters(), lr=0.05)
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + RANK))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    by_both(train)
    directory = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(directory, 0)
    async_save({"w": torch.full((3,), float(RANK))}, checkpoint_id=directory[0]).result()


def test_complex_parts() -> None:
    def scattered(group: Any) -> list[torch.Tensor]:
        output = torch.zeros(2, dtype=torch.complex64)
        dist.reduce_scatter_tensor(output, torch.arange(2.0 * SIZE) * (1 + 2j), group=group)
        return [output]

    by_both(scattered)


@pytest.mark.parametrize("call", [
    lambda one, op: dist.reduce(one, 0, op),
    lambda one, op: dist.reduce_scatter(one.clone(), [one] * SIZE, op),
    lambda one, op: dist.reduce_scatter_tensor(one.clone(), one.repeat(SIZE), op),
])  # fmt: skip
def test_complex_numbers_have_no_product(call: Callable[[torch.Tensor, Any], Any]) -> None:
    """Their real and imaginary parts would be multiplied separately."""
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        with pytest.raises(ValueError, match="Complex tensors can be reduced by Sum and Average"):
            call(torch.tensor([1 + 2j]), op)
    dist.barrier()


def wrong_on_one_rank() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return calls whose arguments are wrong in a way that only the calling rank can see."""
    first, whole, premul = torch.ones(2), torch.ones(2 * SIZE), dist._make_nccl_premul_sum(2.0)
    return {
        "dtype": ("NumPy has no such type", lambda: dist.all_reduce(first.to(torch.float8_e4m3fn))),
        "operation": ("support ReduceOp.PREMUL_SUM", lambda: dist.all_reduce(first, premul)),
        "bits": ("support ReduceOp.BAND", lambda: dist.all_reduce(first.int(), dist.ReduceOp.BAND)),
        "root": ("7 does not", lambda: dist.broadcast(first, 7)),
        "root of reduce": ("7 does not", lambda: WORLD.reduce([first], _options(dist.ReduceOptions, 7))),
        "root of gather": (
            "7 does not", lambda: WORLD.gather([[]], [first], _options(dist.GatherOptions, 7))
        ),
        "type of the output": ("has dtype torch.uint8", lambda: dist.all_gather_into_tensor(
            torch.empty(2 * SIZE, dtype=torch.uint8), first.bool())),
        "type of the sum": ("has dtype torch.int32", lambda: dist.reduce_scatter_tensor(
            torch.empty(2, dtype=torch.int32), whole, dist.ReduceOp.MAX)),
        "sizes": ("must add up", lambda: dist.reduce_scatter_tensor(torch.empty(3), whole)),
        "gathered": ("but must have", lambda: dist.all_gather_into_tensor(torch.empty(2 * SIZE + 1), first)),
        "splits": ("must add up", lambda: WORLD.all_to_all_single(whole, whole, [1] * SIZE, [2] * SIZE)),
        "sparse": ("only by SUM", lambda: dist.all_reduce(first.to_sparse(), dist.ReduceOp.MAX)),
        "complex": ("Sum and Average", lambda: dist.reduce(first.cfloat(), 0, dist.ReduceOp.MAX)),
    }  # fmt: skip


def _options(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


@pytest.mark.parametrize("case", wrong_on_one_rank())
def test_an_argument_that_is_wrong_on_one_rank(case: str) -> None:
    """The other ranks get the same text, and the next calls match each other."""
    told, call = wrong_on_one_rank()[case]
    if RANK == 0:
        with pytest.raises(ValueError, match=told):
            call()
    else:
        with pytest.raises(MismatchError, match=f"rank 0 .*{told}"):
            dist.all_reduce(torch.ones(2))
    dist.all_reduce(tensor := torch.full((2,), RANK + 10.0))
    assert tensor[0].item() == sum(range(10, 10 + SIZE))


def calls_that_differ() -> dict[str, tuple[str, Any, Any]]:
    first, sparse = torch.ones(2), torch.sparse_coo_tensor([[1]], [1.0], (4 + RANK,))
    return {
        "rows": ("sparse tensor of shape", lambda: dist.all_reduce(sparse), lambda: dist.all_reduce(sparse)),
        "shape": (r"\(2, 3\) on rank 0", lambda: dist.all_reduce(torch.ones(2, 3)),
                  lambda: dist.all_reduce(torch.ones(3, 2))),
        "sent": (r"\(2, 3\) on rank 0", lambda: dist.broadcast(torch.ones(2, 3), 0),
                 lambda: dist.broadcast(torch.ones(3, 2), 0)),
        "gathered": (r"\(2, 3\) on rank 0",
                     lambda: dist.all_gather_into_tensor(torch.ones(2 * SIZE, 3), torch.ones(2, 3)),
                     lambda: dist.all_gather_into_tensor(torch.ones(3 * SIZE, 2), torch.ones(3, 2))),
        "divided": (rf"\({SIZE}, 5\) on rank 0",
                    lambda: dist.reduce_scatter_tensor(torch.ones(5), torch.ones(SIZE, 5)),
                    lambda: dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5, SIZE))),
        "sign": (r"torch.int8 on rank 0", lambda: dist.broadcast(torch.ones(2).char(), 0),
                 lambda: dist.broadcast(torch.ones(2).byte(), 0)),
        "root": ("to rank 0 on rank 0", lambda: dist.gather(first, [first.clone() for _ in range(SIZE)], 0),
                 lambda: dist.gather(first, [first.clone() for _ in range(SIZE)] if RANK == 1 else None, 1)),
        "barrier": ("barrier on rank 0", dist.barrier, lambda: dist.all_reduce(first)),
    }  # fmt: skip


@pytest.mark.parametrize("case", calls_that_differ())
def test_calls_that_differ(case: str) -> None:
    told, first, others = calls_that_differ()[case]
    with pytest.raises(MismatchError, match=told):
        (first if RANK == 0 else others)()
    dist.barrier()


@pytest.mark.parametrize("root", [-1, SIZE])
def test_a_root_that_is_not_there(root: int) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        dist.broadcast(torch.ones(2), root, group=WORLD)


def test_functional_collectives_and_tensors_in_parts() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    assert functional.all_reduce(torch.ones(2), "sum", WORLD).tolist() == [SIZE, SIZE]
    gathered = functional.all_gather_tensor(torch.tensor([float(RANK)]), 0, WORLD)
    assert gathered.tolist() == list(map(float, range(SIZE)))
    compiled = torch.compile(lambda x: functional.all_reduce(2 * x, "sum", WORLD) + 1, backend="eager")
    assert compiled(torch.ones(1)).item() == 2 * SIZE + 1
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(6.0 * SIZE).view(2 * SIZE, 3)
    part = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(part.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal(part.sum().full_tensor(), whole.sum())


def test_what_exchanges_the_tensors_of_a_device() -> None:
    """torch requires this from 2.14 on, before point-to-point calls."""
    assert WORLD._get_backend(torch.device("cpu")) is WORLD


def test_what_is_wrong() -> None:
    with pytest.raises(MismatchError, match=rf"\(4,\) on rank {SIZE - 1}"):
        dist.all_reduce(torch.ones(3 + RANK // (SIZE - 1)))
    outputs = [torch.empty(5 - (RANK == 0 and rank == 1)) for rank in range(SIZE)]
    with pytest.raises(MismatchError, match="outputs of"):
        dist.all_gather(outputs, torch.ones(5))
    sends = [SIZE + 1 - RANK, *[1] * (SIZE - 1)]
    first, other = torch.empty(sum(sends)), torch.empty(sum(sends))
    with pytest.raises(ValueError, match="its outputs hold"):
        dist.all_to_all_single(first, other, sends, sends)
    with pytest.raises(ValueError, match=r"has dtype torch\.float64"):
        dist.all_gather_into_tensor(torch.empty(SIZE, dtype=torch.float64), torch.empty(1))
    for tag in (-1, 2**31 - 2):
        with pytest.raises(ValueError, match=f"got tag={tag}"):
            dist.isend(torch.ones(1), 1 - min(RANK, 1), tag=tag)
    for rank in (-2, RANK, SIZE):
        with pytest.raises(ValueError, match=f"rank {rank} is not another rank"):
            WORLD.recv([torch.ones(1)], rank, 0)
    with pytest.raises(ValueError, match="must add up"):
        dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5))
    with pytest.raises(ValueError, match="add up"):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1] * SIZE, [1] * SIZE)
    dist.barrier()
    if RANK == 0:
        with pytest.raises(dist.DistBackendError, match=r"within 0\.2 s"):
            WORLD.allreduce([late := torch.ones(1)]).wait(timedelta(seconds=0.2))
        assert late.item() in (1, SIZE)
    dist.monitored_barrier(GLOO)
    if RANK:
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def test_tensors_on_a_gpu_are_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Nccl:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append(name)

    monkeypatch.setitem(vars(WORLD), "nccl", Nccl())
    far = torch.empty(2, device="meta")  # any device except the CPU
    WORLD.allreduce([far])
    WORLD.broadcast([far])
    WORLD.allgather([[far]], [far])
    WORLD._allgather_base(far, far)
    assert calls == ["allreduce", "broadcast", "allgather", "all_gather_single"]


def test_ranks_that_differ_from_those_of_the_job() -> None:
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.group_rank, options.group_size, options.global_ranks_in_group = RANK, SIZE + 1, []
    options.store = dist.distributed_c10d._get_default_store()
    with pytest.raises(Exception, match=f"{SIZE + 1} in torch.distributed"):
        backend.create(options)
    assert copy.copy(session.engine().size) == SIZE


@pytest.fixture(autouse=True)
def _together() -> Iterator[None]:
    yield
    dist.barrier(GLOO)
