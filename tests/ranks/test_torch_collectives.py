"""Every collective on torch tensors: values by NumPy, gradients by the contract, errors on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from sampled import sampled

import ringdance.torch as hvd
from ringdance.errors import ArgumentError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERY_DAY = (torch.bfloat16, torch.float32, torch.int64)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMPY = {torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    made = np.random.default_rng([seed, rank]).integers(-4 if dtype.is_signed else 0, 5, shape)
    return torch.tensor(made).to(dtype)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.cpu()  # benchmarks/gpu_check.py runs this file with tensors on a GPU
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def expected_reduction(op: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    wide = np.stack([as_numpy(values(rank, shape, dtype).double()) for rank in range(SIZE)])
    result = {
        hvd.Sum: lambda: wide.sum(0), hvd.Min: lambda: wide.min(0), hvd.Max: lambda: wide.max(0),
        hvd.Product: lambda: wide.prod(0), hvd.Average: lambda: wide.sum(0) / SIZE,
    }[op]()
    if not dtype.is_floating_point:
        result = np.trunc(result)
    return torch.tensor(result).to(dtype)


@pytest.mark.parametrize("dtype", sampled("reduced", FLOATS + INTEGERS, 2, EVERY_DAY))
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce_all_types_and_operations(dtype: torch.dtype, op: int) -> None:
    for shape in [(), (0,), (5,), (3, 4, 2)]:
        tensor = values(RANK, shape, dtype)
        expected = expected_reduction(op, dtype, shape)
        result = hvd.allreduce(tensor, op=op)
        assert result.dtype is dtype
        assert result.shape == tensor.shape
        tolerance = 1e-15 if dtype is torch.float64 else 1e-6
        assert torch.allclose(result.double(), expected.double(), rtol=tolerance)
        assert torch.equal(tensor, values(RANK, shape, dtype))
        handle = hvd.allreduce_async(tensor, op=op)
        assert torch.equal(hvd.synchronize(handle), result)
        assert hvd.allreduce_(tensor, op=op) is tensor
        assert torch.equal(tensor, result)


def test_allreduce_of_booleans() -> None:
    mine = torch.tensor([RANK == 0, True, False])
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [True, True, False]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [SIZE == 1, True, False]
    with pytest.raises(ValueError, match="cannot be averaged"):
        hvd.allreduce(mine)


def test_results_do_not_share_the_inputs_memory() -> None:
    tensor = torch.ones(4)
    for result in (
        hvd.allreduce(tensor), hvd.allgather(tensor), hvd.broadcast(tensor, 0),
        hvd.grouped_allreduce([tensor])[0], hvd.alltoall(tensor.repeat(SIZE)), hvd.reducescatter(tensor),
    ):
        result.fill_(7.0)
        assert tensor.tolist() == [1.0] * 4


def test_average_and_op_arguments() -> None:
    ones = torch.ones(2)
    with pytest.warns(DeprecationWarning, match="average="):
        assert hvd.allreduce(ones, False).tolist() == [SIZE] * 2
    with pytest.warns(DeprecationWarning, match="average="):
        assert hvd.allreduce(ones, True).tolist() == [1.0] * 2
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(ones, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="not one of"):
        hvd.allreduce(ones, op=17)


def test_scales() -> None:
    result = hvd.allreduce(torch.full((3,), 2.0), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert result.tolist() == [3.0 * SIZE] * 3
    whole = hvd.allreduce(torch.full((3,), 5, dtype=torch.int32), op=hvd.Sum, postscale_factor=0.5)
    assert whole.tolist() == [int(5 * SIZE * 0.5)] * 3


def test_groups_and_many_in_flight_in_shuffled_order() -> None:
    tensors = [values(RANK, (index, 3), torch.float32) for index in range(1, 6)]
    tensors.append(torch.ones(2, dtype=torch.int64))
    expected = [hvd.allreduce(tensor, op=hvd.Sum) for tensor in tensors]
    for results in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group"),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="group")),
        hvd.synchronize(hvd.grouped_allreduce_async_([tensor.clone() for tensor in tensors], op=hvd.Sum)),
        hvd.grouped_allreduce_([tensor.clone() for tensor in tensors], op=hvd.Sum),
    ):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, expected, strict=True))
    order = np.random.default_rng(RANK).permutation(len(tensors))
    handles = {
        index: hvd.allreduce_async(tensors[index], op=hvd.Sum, name=f"shuffled.{index}") for index in order
    }
    for index, handle in sorted(handles.items()):
        assert torch.equal(hvd.synchronize(handle), expected[index])
    with pytest.raises(IndexError):
        hvd.grouped_allreduce([])


def test_handles() -> None:
    handle = hvd.allreduce_async_(torch.ones(2), name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    for function in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match="not a handle"):
            function(handle)


def test_not_contiguous() -> None:
    inputs = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(hvd.allreduce(inputs), inputs)
    assert torch.equal(hvd.allgather(inputs)[:3], inputs)
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce_(inputs)
    with pytest.raises(ValueError, match="sparse"):
        hvd.allreduce(torch.eye(2).to_sparse())


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + [torch.bool])
def test_allgather_broadcast_alltoall_all_types(dtype: torch.dtype) -> None:
    mine = values(RANK, (RANK + 1, 2), dtype)
    every = torch.cat([values(rank, (rank + 1, 2), dtype) for rank in range(SIZE)])
    assert torch.equal(hvd.allgather(mine), every)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(mine, "gathered")), every)
    pair = [mine, mine[:0]]
    for result in (hvd.grouped_allgather(pair), hvd.synchronize(hvd.grouped_allgather_async(pair))):
        assert torch.equal(result[0], every)
        assert result[1].shape == (0, 2)
    for root in range(SIZE):
        here = values(RANK, (3,), dtype)
        assert torch.equal(hvd.broadcast(here, root), values(root, (3,), dtype))
        assert torch.equal(hvd.synchronize(hvd.broadcast_async(here, root)), values(root, (3,), dtype))
        assert hvd.broadcast_(here, root, "named") is here
        assert torch.equal(here, values(root, (3,), dtype))
        assert hvd.synchronize(hvd.broadcast_async_(here, root)) is here
    rows = [(RANK + place) % 3 for place in range(SIZE)]
    sent = values(RANK, (sum(rows) + 1, 2), dtype)  # one row more than the splits send
    output, received = hvd.alltoall(sent, rows)
    assert received.dtype is torch.int32
    assert received.tolist() == [(rank + RANK) % 3 for rank in range(SIZE)]
    expected = []
    for rank in range(SIZE):
        theirs = [(rank + place) % 3 for place in range(SIZE)]
        start = sum(theirs[:RANK])
        expected.append(values(rank, (sum(theirs) + 1, 2), dtype)[start : start + theirs[RANK]])
    assert torch.equal(output, torch.cat(expected))
    output, received = hvd.synchronize(hvd.alltoall_async(sent[: SIZE * 0]))
    assert output.shape == (0, 2)
    assert received.tolist() == [0] * SIZE


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_reducescatter(dtype: torch.dtype, op: int) -> None:
    for rows in (SIZE * 2 + 1, 1, 0):
        tensor = values(RANK, (rows, 3), dtype)
        whole = hvd.allreduce(tensor, op=op)
        counts = [rows // SIZE + (rank < rows % SIZE) for rank in range(SIZE)]
        own = whole[sum(counts[:RANK]) : sum(counts[: RANK + 1])]
        assert torch.equal(hvd.reducescatter(tensor, op=op), own)
        assert torch.equal(hvd.synchronize(hvd.reducescatter_async(tensor, op=op)), own)
        assert torch.equal(hvd.grouped_reducescatter([tensor, tensor], op=op)[1], own)
        assert torch.equal(hvd.synchronize(hvd.grouped_reducescatter_async([tensor], op=op))[0], own)
    with pytest.raises(RuntimeError, match="reducescatter supports"):
        hvd.reducescatter(torch.ones(4), op=hvd.Adasum)


def test_compression_of_a_tensor() -> None:
    tensor = torch.full((3,), 1.001)
    assert torch.equal(hvd.allreduce(tensor, compression=hvd.Compression.fp16), tensor.half().float())
    assert torch.equal(hvd.allreduce(tensor, compression=hvd.Compression.bf16), tensor.bfloat16().float())
    assert hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16).dtype is torch.int64
    results = hvd.grouped_allreduce([tensor, tensor.double()], compression=hvd.Compression.fp16)
    assert [result.dtype for result in results] == [torch.float32, torch.float64]


# Gradients.


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64).mul_(RANK + 1.0).requires_grad_()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradient_of_allreduce(op: int) -> None:
    tensor = torch.full((4,), RANK + 1.0, dtype=torch.float64)
    total = SIZE * (SIZE + 1) / 2 / (1 if op == hvd.Sum else SIZE)
    x = leaf(4)
    hvd.allreduce(x, op=op, name="g").backward(tensor)
    assert x.grad.tolist() == [total] * 4
    x = leaf(4)
    torch.autograd.backward(hvd.grouped_allreduce([x, x], op=op), [tensor, tensor])
    assert x.grad.tolist() == [2 * total] * 4


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum])
def test_what_is_not_linear_has_no_gradient(op: int) -> None:
    x = leaf(4)
    if SIZE == 1:  # the identity
        hvd.allreduce(x, op=op).sum().backward()
        assert x.grad.tolist() == [1.0] * 4
        return
    if op == hvd.Adasum and SIZE & (SIZE - 1):
        return
    largest = hvd.allreduce(x, op=op, name="found")  # a result may be used
    with pytest.raises(ArgumentError, match=rf"allreduce.found on rank {RANK}: .* so use Average or Sum"):
        largest.sum().backward()
    (x.sum() + hvd.allreduce(x.detach(), op=op).sum()).backward()
    assert x.grad.tolist() == [1.0] * 4


def test_gradients_of_the_others() -> None:
    mean = (SIZE + 1) / 2
    x = torch.ones(RANK + 1, 2, dtype=torch.float64, requires_grad=True)
    gathered = hvd.allgather(x, "gathered")
    weights = torch.arange(float(gathered.numel()), dtype=torch.float64).reshape(gathered.shape)
    gathered.backward(weights * (RANK + 1))
    before = RANK * (RANK + 1) // 2
    assert torch.allclose(x.grad, weights[before : before + RANK + 1] * mean)
    y = torch.ones(RANK + 1, 2, dtype=torch.float64, requires_grad=True)
    hvd.grouped_allgather([x.detach(), y])[1].backward(weights * (RANK + 1))
    assert torch.allclose(y.grad, x.grad)

    for root in range(SIZE):
        b = leaf(3)
        hvd.broadcast(b, root).backward(torch.full((3,), RANK + 1.0, dtype=torch.float64))
        assert b.grad.tolist() == [mean if root == RANK else 0.0] * 3

    a = leaf(SIZE * (RANK + 1) + 1, 2)
    output, received = hvd.alltoall(a, [RANK + 1] * SIZE)
    assert received.tolist() == [rank + 1 for rank in range(SIZE)]
    output.backward(torch.full_like(output, RANK + 1.0))
    expected = [float(rank + 1) for rank in range(SIZE) for _ in range(RANK + 1)] + [0.0]
    assert a.grad[:, 0].tolist() == expected

    for op in (hvd.Average, hvd.Sum):
        for group in (False, True):
            s = leaf(SIZE * 2, 2)
            if group:
                out = hvd.grouped_reducescatter([s], op=op, prescale_factor=2.0)[0]
            else:
                out = hvd.reducescatter(s, op=op, prescale_factor=2.0)
            gradient = torch.full_like(out, RANK + 1.0)
            out.backward(gradient)
            scale = 2.0 * (SIZE if op == hvd.Sum else 1)
            assert s.grad[:, 0].tolist() == [scale * (rank + 1.0) for rank in range(SIZE) for _ in range(2)]
            assert gradient.unique().tolist() == [RANK + 1.0]  # not changed in place


def test_sparse_allreduce() -> None:
    entries = [[1.0, 2.0], [3.0, 4.0]]
    tensor = torch.sparse_coo_tensor([[RANK, 3]], entries, (SIZE + 4, 2), check_invariants=True)
    for op in (hvd.Average, hvd.Sum):
        result = hvd.sparse_allreduce_async(tensor, "rows", op)().to_dense()
        assert torch.allclose(result, hvd.allreduce(tensor.to_dense(), op=op))


# Process sets, join, barrier, errors.


@several
def test_process_sets() -> None:
    evens = hvd.add_process_set(range(0, SIZE, 2))
    odds = hvd.add_process_set(hvd.ProcessSet(range(1, SIZE, 2)))
    mine, other = (evens, odds) if RANK % 2 == 0 else (odds, evens)
    assert mine.included()
    assert mine.rank() == RANK // 2
    assert mine.size() == len(mine.ranks)
    result = hvd.allreduce(torch.tensor([float(RANK)]), op=hvd.Sum, process_set=mine)
    assert result.item() == sum(mine.ranks)
    assert hvd.broadcast(torch.tensor([RANK]), mine.ranks[-1], process_set=mine).item() == mine.ranks[-1]
    with pytest.raises(ValueError, match="not a member"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError):
        other.rank()
    with pytest.raises(ValueError, match="already exists"):
        hvd.add_process_set(evens.ranks)
    with pytest.raises(ValueError, match="already exists"):
        hvd.add_process_set(range(SIZE))
    with pytest.raises(ValueError, match="This job has"):
        hvd.add_process_set([0, SIZE])
    with pytest.raises(ValueError, match="not in process set"):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    hvd.barrier(mine)
    hvd.barrier()
    assert hvd.allgather_object(RANK, process_set=mine) == mine.ranks
    assert hvd.broadcast_object(RANK, mine.ranks[0], process_set=mine) == mine.ranks[0]
    assert hvd.remove_process_set(evens)
    assert hvd.remove_process_set(odds)
    assert not hvd.remove_process_set(odds)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert evens.process_set_id is None
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=evens)


def test_join() -> None:
    for step in range(RANK + 1):
        result = hvd.allreduce(torch.ones(3), name=f"before.join.{step}")
        assert torch.allclose(result, torch.full((3,), (SIZE - step) / SIZE))
    last = hvd.join()
    assert last == SIZE - 1
    assert hvd.allreduce(torch.ones(3)).tolist() == [1.0] * 3


def mismatched(case: int) -> None:
    odd = RANK % 2
    if case == 0:
        hvd.allreduce(torch.ones(3 + odd), name="mismatch")
    elif case == 1:
        hvd.allreduce(torch.ones(3, dtype=[torch.float32, torch.float64][odd]), name="mismatch")
    elif case == 2:
        hvd.broadcast(torch.ones(3), odd, name="mismatch")
    else:
        hvd.allgather(torch.ones(3, 2 + odd), name="mismatch")


@several
def test_mismatches_raise_on_all_ranks() -> None:
    for case in range(4):
        with pytest.raises(RuntimeError):
            mismatched(case)
        hvd.barrier()
    assert hvd.allreduce(torch.ones(3), name="mismatch").tolist() == [1.0] * 3


@several
@pytest.mark.parametrize("wrong", ["text", torch.ones(4).to(torch.float8_e4m3fn), torch.eye(4).to_sparse()])
def test_a_wrong_tensor_on_one_rank(wrong: Any) -> None:
    odd = SIZE - 1 == RANK
    for name in ("wrong.tensor", None):
        told = "" if odd else f"because of the call on rank {SIZE - 1} "
        with pytest.raises(ValueError if odd else RuntimeError, match=told):
            hvd.allreduce(wrong if odd else torch.ones(4), name=name)
        assert hvd.allreduce(torch.ones(4), name=name).tolist() == [1.0] * 4


WRONG_ALONE: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "operation": (hvd.allreduce, torch.ones(4), {"op": "sum"}),
    "group": (hvd.grouped_allreduce, [], {}),
    "scalar": (hvd.allgather, torch.tensor(1.0), {}),
    "compression": (hvd.allreduce, torch.ones(4), {"compression": "fp16"}),
    "scatter": (hvd.reducescatter_async, torch.ones(4), {"op": 99}),
}


@several
@pytest.mark.parametrize("what", WRONG_ALONE)
def test_a_wrong_argument_on_one_rank(what: str) -> None:
    function, tensor, others = WRONG_ALONE[what]
    right = [torch.ones(4)] if what == "group" else torch.ones(4)
    odd = SIZE - 1 == RANK
    for name in ("wrong.argument", None):
        told = None if odd else f"the call on rank {SIZE - 1}"
        kinds = (ValueError, IndexError, AttributeError) if odd else RuntimeError
        with pytest.raises(kinds, match=told):  # noqa: PT012
            result = function(tensor if odd else right, name=name, **(others if odd else {}))
            if isinstance(result, int):
                hvd.synchronize(result)
        assert hvd.allreduce(torch.ones(4), name=name).tolist() == [1.0] * 4


@several
def test_an_error_of_one_rank_reaches_the_others() -> None:
    with pytest.raises(ValueError if RANK == 0 else RuntimeError, match="splits"):
        hvd.alltoall(torch.ones(SIZE), [SIZE] * SIZE if RANK == 0 else [1] * SIZE, name="bad.splits")
    hvd.barrier()  # a correct call with this name would replace the wrong one if it came before the round
    with pytest.raises(ValueError, match="int32"):
        hvd.alltoall(torch.ones(SIZE), torch.ones(SIZE, dtype=torch.int64))
    assert hvd.alltoall(torch.ones(SIZE), name="bad.splits").tolist() == [1.0] * SIZE


def test_without_dimensions() -> None:
    with pytest.raises(IndexError):
        hvd.allgather(torch.tensor(1.0))
    for call in (hvd.alltoall, hvd.reducescatter):
        with pytest.raises((RuntimeError, ValueError)):
            call(torch.tensor(1.0))
    hvd.barrier()


@several
def test_a_name_in_flight_twice() -> None:
    if RANK == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(ValueError, match="twice"):  # in flight, because the others have not submitted it
            hvd.allreduce_async(torch.ones(2), name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        first = hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(first).tolist() == [1.0, 1.0]


def test_topology() -> None:
    assert 0 <= hvd.local_rank() < hvd.local_size() <= SIZE
    assert hvd.cross_rank() < hvd.cross_size()
    assert hvd.is_homogeneous()
    assert hvd.global_process_set.ranks == list(range(SIZE))
    assert hvd.global_process_set.rank() == RANK
    assert hvd.nccl_built() >= 0
    assert hvd.mpi_built()
    assert hvd.mpi_threads_supported()
