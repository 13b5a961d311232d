"""All collectives except allreduce compared with NumPy, in every way that bytes can move."""

from __future__ import annotations

import time

import numpy as np
import pytest
from by_numpy import DTYPES, FLOATS, HALVES, INTEGERS, all_values, reduced, rows_of, same, values
from sampled import sampled

import ringdance.numpy as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()

EVERY_DAY = ("bool", "bfloat16", "float32", "complex64")  # each of a different size; others change daily
RESTS: list[tuple[int, ...]] = [(), (1,), (3, 5), (0,), (1700,)]


@pytest.mark.parametrize("dtype", sampled("allgather", DTYPES, 2, EVERY_DAY))
def test_allgather_of_uneven_rows(way: str, dtype: str) -> None:
    """Some ranks send no rows, one case has no rows at all, and one is larger than a chunk."""
    for seed, rest in enumerate(RESTS):
        for rows in (
            [2] * SIZE,
            [3 * r for r in range(SIZE)],
            [int(r == 0) for r in range(SIZE)],
            [0] * SIZE,
            [100 + 50 * r for r in range(SIZE)],
        ):
            parts = [values(r, dtype, (rows[r], *rest), seed) for r in range(SIZE)]
            same(hvd.allgather(parts[RANK]), np.concatenate(parts))


def test_allgather_of_large_rows(way: str) -> None:
    parts = [values(r, "float64", (60_000 * (r + 1) + 5, 3)) for r in range(SIZE)]
    same(hvd.allgather(parts[RANK], name="large"), np.concatenate(parts))
    for nothing in (0, SIZE - 1):
        parts = [values(r, "float64", (0 if r == nothing else 20_000 * (r + 1), 3)) for r in range(SIZE)]
        same(hvd.allgather(parts[RANK], name="large"), np.concatenate(parts))


def test_allgather_under_one_name_with_other_rows_each_time(way: str) -> None:
    for step in range(6):
        parts = [values(r, "int32", ((r + step) % 4, 2), step) for r in range(SIZE)]
        same(hvd.allgather(parts[RANK], name="again"), np.concatenate(parts))


def test_grouped_and_asynchronous_allgather(way: str) -> None:
    parts = [[values(r, dtype, (i + r, 2), i) for i, dtype in enumerate(DTYPES)] for r in range(SIZE)]
    later = hvd.allgather(parts[RANK], name="later", wait=False)
    single = hvd.allgather(parts[RANK][3], wait=False)
    now = hvd.allgather(parts[RANK])
    for i, (first, second) in enumerate(zip(now, hvd.synchronize(later), strict=True)):
        same(first, np.concatenate([row[i] for row in parts]))
        same(second, first)
    same(hvd.synchronize(single), now[3])


@pytest.mark.parametrize("dtype", sampled("broadcast", DTYPES, 2, EVERY_DAY))
def test_broadcast_from_every_root(way: str, dtype: str) -> None:
    for root in range(SIZE):
        for shape in [(), (0,), (1,), (3, 5, 7), (9001,)]:
            array = values(RANK, dtype, shape)
            kept = array.copy()
            result = hvd.broadcast(array, root)
            same(result, values(root, dtype, shape))
            same(array, kept)
            assert not np.shares_memory(result, array)
            assert hvd.broadcast(array, root, out=array) is array
            same(array, result)


def test_broadcast_of_many_and_large(way: str) -> None:
    shapes = [(i, 3) for i in range(60)] + [(400_000,)]
    handles = [
        hvd.broadcast(values(RANK, "float32", shape, i), SIZE - 1, name=f"weight {i}", wait=False)
        for i, shape in enumerate(shapes)
    ]
    for i, (shape, handle) in enumerate(zip(shapes, handles, strict=True)):
        same(hvd.synchronize(handle), values(SIZE - 1, "float32", shape, i))
    array = values(RANK, "float64", (300_000,))
    assert hvd.synchronize(hvd.broadcast(array, 0, out=array, wait=False)) is array
    same(array, values(0, "float64", (300_000,)))


def alltoall_expected(
    dtype: str, rest: tuple[int, ...], splits: list[list[int]], rows: list[int]
) -> list[np.ndarray]:
    """Return what this rank receives from each rank. ``splits[i][j]`` rows go from i to j."""
    results = []
    for sender in range(SIZE):
        array = values(sender, dtype, (rows[sender], *rest))
        start = sum(splits[sender][:RANK])
        results.append(array[start : start + splits[sender][RANK]])
    return results


@pytest.mark.parametrize("dtype", sampled("alltoall", DTYPES, 2, EVERY_DAY))
def test_alltoall_with_splits(way: str, dtype: str) -> None:
    everywhere = {
        "uneven": [[i + 2 * j for j in range(SIZE)] for i in range(SIZE)],
        "to one": [[7 * (j == SIZE - 1) for j in range(SIZE)] for i in range(SIZE)],
        "from one": [[3 * (i == 0) for j in range(SIZE)] for i in range(SIZE)],
        "none": [[0] * SIZE] * SIZE,
        "large": [[100 + i + j for j in range(SIZE)] for i in range(SIZE)],
    }
    for splits in everywhere.values():
        for rest in RESTS:
            for spare in (0, 2):  # rows that are not sent to any rank
                rows = [sum(row) + spare for row in splits]
                want = alltoall_expected(dtype, rest, splits, rows)
                got, received = hvd.alltoall(values(RANK, dtype, (rows[RANK], *rest)), splits[RANK])
                same(got, np.concatenate(want))
                assert received.tolist() == [len(part) for part in want]


def test_alltoall_of_large_parts(way: str) -> None:
    splits = [[50_000 + 999 * i + j for j in range(SIZE)] for i in range(SIZE)]
    rows = [sum(row) for row in splits]
    want = alltoall_expected("int64", (2,), splits, rows)
    got, _ = hvd.alltoall(values(RANK, "int64", (rows[RANK], 2)), np.array(splits[RANK], np.int32))
    same(got, np.concatenate(want))


def test_alltoall_in_equal_parts_and_asynchronous(way: str) -> None:
    splits, rows = [[3] * SIZE] * SIZE, [3 * SIZE] * SIZE
    array = values(RANK, "float32", (3 * SIZE, 4))
    want = np.concatenate(alltoall_expected("float32", (4,), splits, rows))
    same(hvd.alltoall(array), want)
    same(hvd.synchronize(hvd.alltoall(array, name="later", wait=False)), want)
    later = hvd.alltoall(array, [3] * SIZE, name="later", wait=False)
    got, received = hvd.synchronize(later)
    same(got, want)
    assert received.tolist() == [3] * SIZE


@pytest.mark.parametrize(
    "dtype", sampled("reducescatter", [*INTEGERS, *FLOATS, "complex64"], 2, ("int64", "bfloat16", "float32"))
)
def test_reducescatter(way: str, dtype: str) -> None:
    """Rows that divide evenly, rows that do not, and fewer rows than ranks all give NumPy's result."""
    for operation, op in (("sum", hvd.Sum), ("average", hvd.Average)):
        for rows in (0, 1, SIZE - 1, SIZE, 2 * SIZE + 1, 501):
            for rest in [(), (5,), (3, 0), (2, 3)]:
                parts = all_values(SIZE, dtype, (rows, *rest))
                want = reduced(parts, operation)[rows_of(RANK, rows, SIZE)]
                same(hvd.reducescatter(parts[RANK], op=op), want)


def test_reducescatter_of_large_scaled_and_grouped(way: str) -> None:
    parts = all_values(SIZE, "float32", (100_003, 5))
    want = reduced(parts, "sum", 0.5, 4.0)[rows_of(RANK, 100_003, SIZE)]
    same(hvd.reducescatter(parts[RANK], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), want)
    for dtype in HALVES:
        parts = all_values(SIZE, dtype, (101, 5))
        want = reduced(parts, "average", 0.3, 7.0)[rows_of(RANK, 101, SIZE)]
        same(hvd.reducescatter(parts[RANK], prescale_factor=0.3, postscale_factor=7.0), want)
    group = [all_values(SIZE, dtype, (4 + i, 3), i) for i, dtype in enumerate([*INTEGERS, *FLOATS])]
    later = hvd.reducescatter([row[RANK] for row in group], name="later", op=hvd.Sum, wait=False)
    single = hvd.reducescatter(group[5][RANK], wait=False)
    now = hvd.reducescatter([row[RANK] for row in group])
    for i, (row, average, total) in enumerate(zip(group, now, hvd.synchronize(later), strict=True)):
        own = rows_of(RANK, 4 + i, SIZE)
        same(average, reduced(row, "average")[own])
        same(total, reduced(row, "sum")[own])
    same(hvd.synchronize(single), now[5])


def test_barrier_holds_everybody(way: str) -> None:
    """No rank passes before the last one has arrived."""
    for _ in range(5):
        before = time.time()
        if RANK == SIZE - 1:
            time.sleep(0.02)
        came = time.time()
        hvd.barrier()
        left = time.time()
        assert left >= max(hvd.allgather_object(came))
        assert left >= before


def test_results_do_not_change_later(way: str) -> None:
    """The caller owns a call's result: later calls that use the same memory do not change it."""
    first = hvd.allreduce(np.arange(5000.0), op=hvd.Sum)
    gathered = hvd.allgather(np.full((10, 3), RANK))
    for step in range(4):
        hvd.allreduce(np.full(5000, float(step)), op=hvd.Sum)
        hvd.allgather(np.full((10, 3), -step))
    same(first, np.arange(5000.0) * SIZE)
    same(gathered, np.repeat(np.arange(SIZE), 10)[:, None] * np.ones((1, 3), np.int64))


@pytest.mark.ranks(1)
def test_one_rank_is_the_identity(way: str) -> None:
    for dtype in DTYPES:
        array = values(0, dtype, (6, 5))
        same(hvd.allgather(array), array)
        same(hvd.broadcast(array, 0), array)
        same(hvd.alltoall(array), array)
        if dtype != "bool":
            same(hvd.reducescatter(array), array)
    got, received = hvd.alltoall(np.arange(6), [4])
    same(got, np.arange(4))
    assert received.tolist() == [4]
    hvd.barrier()
