"""Older ways to call Horovod, in a job of one process without MPI."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod")

import torch

import horovod.torch as hvd
from horovod.torch.compression import Compressor


@pytest.fixture(autouse=True)
def _no_job() -> Iterator[None]:
    hvd.shutdown()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("comm", [None, [], [0], (0,), range(1), (rank for rank in [0])])
def test_comm_without_a_launcher(comm: Any) -> None:
    assert hvd.init(comm) is None
    assert (hvd.rank(), hvd.size(), hvd.mpi_threads_supported()) == (0, 1, True)


@pytest.mark.parametrize("comm", [[1], [0, 1], 5, "ranks", [0.5], object()])
def test_comm_that_cannot_be(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"init\(comm"):
        hvd.init(comm=comm)
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.is_initialized()


def test_processes_of_torchrun_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(RuntimeError, match=r"torchrun.*ringdance run -np N"):
        hvd.init()
    monkeypatch.setenv("WORLD_SIZE", "1")
    hvd.init()
    assert hvd.size() == 1


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": "32"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**SLURM, "SLURM_PROCID": "0"}, r"Slurm job 7 has .* 4 host.*\(n1, n2, n3, ...\).*`ringdance run "),
        (SAGEMAKER, r"SageMaker has allocated 2 host.*\(algo-1, algo-2\).*processes_per_host"),
        ({"SLURM_PROCID": "0", "RANK": "1", "WORLD_SIZE": "2"}, "torchrun.*ringdance run -np N"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_hosts_of_a_scheduler_are_not_left_idle(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: str, loaded: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if loaded:
        pytest.importorskip("mpi4py.MPI")
    else:
        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(RuntimeError, match=rf"{said}.*you want a single process, call hvd.init\(\[0\]\)"):
        hvd.init()
    assert not hvd.is_initialized()
    if not loaded:
        hvd.init([0])
        assert hvd.size() == 1
        hvd.shutdown()
        monkeypatch.setenv("RINGDANCE_JOB", "started by `ringdance run -np 1`")
        hvd.init()
        assert hvd.size() == 1


@pytest.mark.parametrize("wrong", ["static", "", [[0]], [0]])
def test_process_sets_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match="process_sets"):
        hvd.init(process_sets=wrong)
    assert not hvd.is_initialized()


def test_process_sets_of_init() -> None:
    alone = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="already exists"):
        hvd.init(process_sets=[alone])  # the global process set already has these ranks
    assert hvd.is_initialized()
    assert alone.process_set_id is None
    hvd.init(process_sets="Dynamic")
    with pytest.raises(ValueError, match="already exists"):
        hvd.add_process_set([0])
    for ranks in (["a"], [0.5], 3, [0, 0], [-1]):
        with pytest.raises(ValueError, match="ProcessSet"):
            hvd.ProcessSet(ranks)


def test_a_process_set_and_its_members() -> None:
    made = hvd.ProcessSet(iter([2, 0, 1]))
    assert (made.ranks, made.process_set_id, made.mpi_comm) == ([0, 1, 2], None, None)
    assert (made.size(), made.rank()) == (None, None)
    assert str(made) == "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)"
    assert made != hvd.ProcessSet([0, 1, 2])
    with pytest.raises(ValueError, match="init"):
        made.included()
    hvd.init()
    assert made.included() is True
    assert hvd.ProcessSet([1]).included() is False
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.ranks, everybody.size(), everybody.rank()) == (0, [0], 1, 0)
    assert everybody is hvd.mpi_ops.global_process_set
    assert hvd.remove_process_set(everybody) is False
    assert hvd.remove_process_set(made) is False
    for wrong in (made, None, 0):
        with pytest.raises(ValueError, match=r"not registered|must be a ProcessSet"):
            hvd.allreduce(torch.ones(1), process_set=wrong)
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}


def test_before_init() -> None:
    for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "stop_timeline"):
        with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
            getattr(hvd, name)()
    for call in (hvd.mpi_ops.is_homogeneous, hvd.mpi_threads_supported, lambda: hvd.start_timeline("x")):
        with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
            call()
    for kind in (hvd.allreduce_async, hvd.allgather_async, hvd.alltoall_async, hvd.reducescatter_async):
        with pytest.raises(hvd.HorovodInternalError, match=r"hvd\.init\(\)"):
            kind(torch.ones(2))
    assert hvd.mpi_enabled() is False
    hvd.shutdown()


def test_timeline(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hvd.init()
    with pytest.raises(ValueError, match="RINGDANCE_TIMELINE=DYNAMIC"):
        hvd.start_timeline("/nowhere/t.json")
    assert hvd.stop_timeline() is None
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hvd.init()
    hvd.start_timeline("/nowhere/t.json", mark_cycles=True)
    assert "the timeline is not written: /nowhere/t.json: No such file" in caplog.text
    hvd.shutdown()


def test_average_and_positions() -> None:
    hvd.init()
    tensor = torch.tensor([2.0])
    for average in (True, False):
        with pytest.warns(DeprecationWarning, match="op=") as seen:
            assert hvd.allreduce(tensor, average).item() == 2.0
        assert len(seen) == 1
        assert seen[0].filename == __file__
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hvd.allreduce(tensor, None, "name", hvd.Compression.fp16).dtype == torch.float32
        assert hvd.reducescatter(tensor, "name", hvd.Compression.fp16).dtype == torch.float32
        assert hvd.broadcast_(tensor, 0, "name") is tensor


def test_handles_are_used_once() -> None:
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(3), name="x")
    assert type(handle) is int
    assert hvd.poll(handle) is True
    assert torch.equal(hvd.synchronize(handle), torch.ones(3))
    for used in (handle, 10**9, -1):
        assert hvd.synchronize(used) is None
        with pytest.raises(ValueError, match="not a handle"):
            hvd.poll(used)
    kept = hvd.allreduce_async(torch.ones(3))
    hvd.shutdown()
    hvd.init()
    assert hvd.synchronize(kept) is None


@pytest.mark.parametrize("kind", ["allreduce", "allgather_async", "broadcast", "alltoall", "reducescatter"])
def test_what_is_no_tensor(kind: str) -> None:
    hvd.init()
    root = (0,) if kind == "broadcast" else ()
    for wrong in ([1.0], torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex32)):
        if wrong == [1.0] and kind == "reducescatter":
            continue  # the compression raises another error first
        with pytest.raises(ValueError, match=r"Tensor|tensor|complex32"):
            getattr(hvd, kind)(wrong, *root)


def test_groups() -> None:
    hvd.init()
    for kind in ("grouped_allreduce", "grouped_allreduce_async_", "grouped_allgather"):
        with pytest.raises(IndexError):
            getattr(hvd, kind)([])
    pair = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    assert type(hvd.synchronize(hvd.grouped_allreduce_async(pair))) is tuple
    assert all(a is b for a, b in zip(hvd.grouped_allreduce_(pair), pair, strict=True))


def test_splits() -> None:
    hvd.init()
    rows = torch.arange(6).reshape(3, 2)
    assert torch.equal(hvd.alltoall(rows), rows)
    for splits in ([2], (2,), torch.tensor([2], dtype=torch.int32)):
        output, received = hvd.alltoall(rows, splits)
        assert torch.equal(output, rows[:2])
        assert (received.dtype, received.tolist()) == (torch.int32, [2])
    output, received = hvd.synchronize(hvd.alltoall_async(rows))
    assert received.tolist() == [3]
    for wrong in (torch.tensor([2]), torch.tensor([[2]], dtype=torch.int32), [4], [1, 1], [-1], [1.5]):
        with pytest.raises(ValueError, match="split"):
            hvd.alltoall(rows, wrong)
    for scalar in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
        with pytest.raises((RuntimeError, IndexError)):
            scalar(torch.tensor(1.0))


def test_sparse_is_gathered_and_not_merged() -> None:
    hvd.init()
    tensor = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    for op in (hvd.Average, hvd.Sum):
        result = hvd.sparse_allreduce_async(tensor, "sparse", op)()
        assert result._nnz() == 2
        assert result.to_dense().tolist() == [0, 5, 0, 0]
    with pytest.raises(ValueError, match="sparse"):
        hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)


class Halved(Compressor):
    """A compressor that derives from the base class."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Halve the tensor."""
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Restore the tensor."""
        return tensor * ctx


class Doubled:
    """An instance with the two methods, and with state."""

    calls = 0

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        self.calls += 1
        return tensor * 2, None

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor / 2


def test_compression_of_the_user_s_own() -> None:
    hvd.init()
    doubled = Doubled()
    for compression in (Halved, Halved(), doubled):
        assert hvd.allreduce(torch.full((2,), 4.0), compression=compression).tolist() == [4.0, 4.0]
        assert hvd.grouped_allreduce([torch.ones(1)], compression=compression)[0].item() == 1.0
    assert doubled.calls == 2
    small, context = hvd.Compression.fp16.compress(torch.ones(2))
    assert (small.dtype, context) == (torch.float16, torch.float32)
    assert hvd.Compression.fp16.decompress(small, context).dtype == torch.float32
    whole, context = hvd.Compression.fp16.compress(torch.ones(2, dtype=torch.int64))
    assert whole.dtype == torch.int64
    assert issubclass(hvd.Compression.fp16, Compressor)


def test_the_optimizer_as_scripts_know_it() -> None:
    hvd.init()
    net = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        plain, net.named_parameters(), hvd.Compression.fp16, 1, hvd.Average, 1.0, 0, None, False,
        hvd.global_process_set,
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups[0]["momentum"] == 0.9
    for set_to_none in (True, False):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (net.weight.grad is None) is set_to_none
    net(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize") as seen:
        optimizer.step()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    optimizer.set_backward_passes_per_step(2)


def test_groups_may_have_parameters_that_the_optimizer_has_not() -> None:
    hvd.init()
    body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    both = [*body.named_parameters("body"), *head.named_parameters("head")]
    groups = [list(body.parameters()), list(head.parameters())]
    made = hvd.DistributedOptimizer(optimizer, both, groups=groups)
    assert isinstance(made, torch.optim.SGD)
    for wrong in (0, -1, True, "all", [["name"]], [[head.weight, head.weight]], [head.weight]):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.1), both, groups=wrong)
