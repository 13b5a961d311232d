"""join: ranks that run out of data contribute zeros to the others' reductions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_numpy import Array, all_values, reduced, same

import ringdance.numpy as hvd
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)


def inputs_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> list[Array]:
    """Return integers, whose sums are exact in any order, without -0.0, which would disturb MPI's minimum."""
    inputs = all_values(SIZE, dtype, shape, seed)
    return [np.trunc(4 * part).astype(part.dtype) + part.dtype.type(0) for part in inputs]


def expected(early: int, dtype: str, shape: tuple[int, ...], operation: str, seed: int = 0) -> Array:
    inputs = inputs_of(dtype, shape, seed)
    if operation in ("min", "max", "product"):
        del inputs[early]
    else:
        inputs[early] = np.zeros_like(inputs[early])
    return reduced(inputs, operation)


@several
@pytest.mark.parametrize("named", [True, False])
def test_each_rank_joins_first_once(way: str, named: bool) -> None:
    for early in range(SIZE):
        if early != RANK:
            for step in range(4):
                for dtype in ("float32", "int64", "bfloat16"):
                    inputs = inputs_of(dtype, (40, 3), step)[RANK]
                    got = hvd.allreduce(inputs, name=f"join {dtype}" if named else None, op=hvd.Average)
                    same(got, expected(early, dtype, (40, 3), "average", step))
        last = hvd.join()
        assert last != early
        assert len(set(hvd.allgather_object(last))) == 1
    same(hvd.allreduce(np.full(3, RANK), op=hvd.Sum), np.full(3, sum(range(SIZE))))


@several
def test_the_last_is_named(way: str) -> None:
    for late in range(SIZE):
        if late == RANK:
            hvd.allreduce(np.ones(1000), name="alone", op=hvd.Sum)
            time.sleep(0.05)
            # All others can join only after this completes. They have no other work.
            hvd.allreduce(np.ones(1000), name="alone", op=hvd.Sum)
        assert hvd.join() == late


@several
def test_groups_min_max_product_and_large(way: str) -> None:
    """A joined rank does not change a minimum, maximum or product."""
    if RANK != 0:
        for name, op in (("min", hvd.Min), ("max", hvd.Max), ("product", hvd.Product)):
            inputs = inputs_of("float64", (1 << 17,))[RANK]
            same(hvd.allreduce(inputs, op=op), expected(0, "float64", (1 << 17,), name))
        group = [inputs_of(dtype, (5, 2))[RANK] for dtype in ("int32", "float16")]
        for got, dtype in zip(hvd.allreduce(group, op=hvd.Sum), ("int32", "float16"), strict=True):
            same(got, expected(0, dtype, (5, 2), "sum"))
    hvd.join()


@several
def test_what_was_pending_comes_before_the_join(way: str) -> None:
    """A rank's work in flight completes with its own values even if join was called after it."""
    handles = [
        hvd.allreduce(np.full(10, RANK + i), name=f"before {i}", op=hvd.Sum, wait=False) for i in range(10)
    ]
    if RANK == SIZE - 1:
        hvd.join()
    results = [hvd.synchronize(handle) for handle in handles]
    for i, got in enumerate(results):
        same(got, np.full(10, sum(range(SIZE)) + i * SIZE))
    if RANK != SIZE - 1:
        same(hvd.allreduce(np.ones(4), op=hvd.Sum), np.full(4, SIZE - 1.0))
        hvd.join()


@several
@pytest.mark.parametrize("named", [True, False])
def test_only_allreduce_while_somebody_has_joined(way: str, named: bool) -> None:
    name = "under join" if named else None
    collectives: list[Callable[[], Any]] = [
        lambda: hvd.allgather(np.ones((2, 2)), name=name),
        lambda: hvd.broadcast(np.ones(3), SIZE - 1, name=name),
        lambda: hvd.alltoall(np.ones(2 * SIZE), name=name),
        lambda: hvd.reducescatter(np.ones((2, 3)), name=name),
        lambda: hvd.allgather([np.ones(2), np.ones(3)], name=name),
    ]
    for kind in collectives:  # once before any rank joins, so that the names are known
        kind()
    if RANK != 0:
        for kind in collectives:
            with pytest.raises(MismatchError, match=r"while some ranks have joined \(rank 0 on host"):
                kind()
        same(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, SIZE - 1.0))
    hvd.join()
    for kind in collectives:
        kind()


@several
def test_mismatch_while_somebody_has_joined(way: str) -> None:
    if SIZE == 2:
        hvd.join()
        return
    if RANK != 1:
        with pytest.raises(MismatchError, match="Mismatched shapes"):
            hvd.allreduce(np.ones(2 + RANK), name="differs")
        same(hvd.allreduce(np.ones(2), name="differs", op=hvd.Sum), np.full(2, SIZE - 1.0))
    hvd.join()


@several
def test_barrier_and_new_names_under_join(way: str) -> None:
    if RANK != SIZE - 1:
        hvd.barrier()
        for i in range(5):
            same(
                hvd.allreduce(np.ones(i), name=f"new under join {way} {i}", op=hvd.Sum),
                np.full(i, SIZE - 1.0),
            )
    hvd.join()


@several
def test_barrier_joins_at_random(way: str) -> None:
    """In ten epochs, each rank has a random number of batches."""
    made = np.random.default_rng(5)
    for _ in range(10):
        batches = made.integers(0, 6, SIZE)
        for step in range(batches[RANK]):
            got = hvd.allreduce(np.full(7, 1.0), name="batch", op=hvd.Sum)
            same(got, np.full(7, float((batches > step).sum())))
        last = hvd.join()
        assert batches[last] == batches.max()


@pytest.mark.ranks(1)
def test_one_rank_joins_at_once(way: str) -> None:
    assert hvd.join() == 0
