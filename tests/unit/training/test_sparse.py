"""Rows of tables over all ranks: merged, and sent either way, always with the same result."""

from __future__ import annotations

import logging
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from loopback_job import job

from ringdance.core import labels
from ringdance.errors import ArgumentError, CollectiveError
from ringdance.settings import Settings
from ringdance.training import collectives
from ringdance.training.gradients.sparse import Rows, SparseExchange, merge, route_of
from ringdance.training.process_sets import add_process_set

Array = np.ndarray[Any, Any]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64]


def some_rows(seed: int, count: int, table: int, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """Return keys with repetitions, and values whose sums are exact in every type."""
    made = np.random.default_rng(seed)
    return made.integers(0, table, count), made.integers(-4, 5, (count, *shape)).astype(dtype)


def dense(parts: list[tuple[Array, Array]], table: int, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Compute the same with NumPy: sums in a dense table, and the rows that were used."""
    whole = np.zeros((table, *shape))
    used = np.zeros(table, bool)
    for keys, values in parts:
        np.add.at(whole, keys, values.astype(np.float64))
        used[keys] = True
    return whole, np.flatnonzero(used)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_merging_sums_equal_keys(dtype: Any, shape: tuple[int, ...]) -> None:
    for count in (0, 1, 2, 7, 40, 400):  # the last count has many ascending runs
        keys, values = some_rows(count, count, 9, shape, dtype)
        before = keys.copy(), values.copy()
        merged_keys, sums = merge(keys, values)
        whole, used = dense([(keys, values)], 9, shape)
        assert merged_keys.tolist() == used.tolist()
        assert sums.dtype == np.dtype(dtype)
        assert sums.shape == (len(used), *shape)
        assert (sums.astype(np.float64) == whole[used]).all()
        assert (keys == before[0]).all()
        assert (values == before[1]).all()


def test_narrow_floats_are_rounded_once() -> None:
    """In float16, 2048 + 1 is 2048. The sum 2048 + 1 + 1 is 2050 only in a wider type."""
    keys = np.zeros(3, np.int64)
    assert merge(keys, np.array([2048, 1, 1], np.float16))[1].tolist() == [2050]
    assert merge(keys, np.array([256, 1, 1], ml_dtypes.bfloat16))[1].astype(float).tolist() == [258]
    assert merge(keys, np.array([60000, 60000, 0], np.float16), 2)[1].tolist() == [60000]
    many = np.full(201, 1, np.float16)
    many[0] = 2048
    assert merge(np.zeros(201, np.int64), many)[1].tolist() == [2248]


def test_the_route_goes_by_density_and_size() -> None:
    assert route_of(0, 100_000, 64) == route_of(5000 * 2, 10_000_000, 64) == "rows"
    assert route_of(29_999, 100_000, 64) == "rows"
    assert route_of(30_000, 100_000, 64) == route_of(400_000, 100_000, 64) == "dense"
    assert route_of(10**12, -1, 64) == "rows"  # the size of the table is unknown
    assert route_of(1, 1024, 64) == "dense"
    assert route_of(1, 1025, 64) == "rows"


@pytest.mark.parametrize("route", ["auto", "rows", "dense"])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_routes_give_the_same(size: int, average: bool, route: str) -> None:
    tables = {"wide": (50, 3, np.float32), "flat": (7, 0, np.float64), "half": (30, 2, np.float16)}
    inputs = {
        name: [some_rows(rank + 5, 4 * (rank + 1) * size, rows, (columns,) * bool(columns), dtype)
               for rank in range(size)]
        for name, (rows, columns, dtype) in tables.items()
    }  # fmt: skip

    def program(engine: Any) -> None:
        parts = [Rows(*inputs[name][engine.rank], table[0]) for name, table in tables.items()]
        for name in ("named", None):
            exchange = SparseExchange(engine, parts, list(tables), name=name, average=average)
            merged = exchange.wait()
            if route != "auto":
                assert set(exchange.routes) == {route}
            for rows_, (table, (rows, columns, dtype)) in zip(merged, tables.items(), strict=True):
                whole, used = dense(inputs[table], rows, (columns,) * bool(columns))
                assert rows_.keys.tolist() == used.tolist()
                assert rows_.table == rows
                assert rows_.values.dtype == np.dtype(dtype)
                wanted = whole[used] / (size if average else 1)
                tolerance = 1e-3 if dtype == np.float16 else 1e-6
                np.testing.assert_allclose(rows_.values.astype(float), wanted, rtol=tolerance)

    job(size, program, Settings(sparse=route))


def test_the_choice_follows_what_all_ranks_have_and_can_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    def program(engine: Any) -> list[str]:
        seen = []
        for count in (2, 400, 3):  # rank 1 has twice as many
            keys = np.arange(count * (engine.rank + 1))
            part = Rows(keys, np.ones((len(keys), 8)), 2000)
            exchange = SparseExchange(engine, [part], ["table"], name="t")
            exchange.wait()
            seen += exchange.routes
        return seen

    caplog.set_level(logging.INFO, "ringdance")
    logging.getLogger("ringdance").propagate = True
    assert job(2, program) == [["rows", "dense", "rows"]] * 2
    messages = [record.getMessage() for record in caplog.records if "the gradient of" in record.getMessage()]
    assert messages == [
        "ringdance: the gradient of table is exchanged as rows: 2 ranks have 6 rows in total, and the "
        "table has 2000 rows (setting sparse=auto)."
    ]


def test_ranks_without_rows_and_rows_that_cancel() -> None:
    """A row that was used stays even if its sum is zero, because optimizers with moments see it."""

    def program(engine: Any) -> list[list[float]]:
        results = []
        for table in (4, 10_000):
            keys = np.array([] if engine.rank == 2 else [3], np.int64)
            values = np.full((len(keys), 2), 1.0 - 2 * engine.rank)
            (merged,) = SparseExchange(engine, [Rows(keys, values, table)], ["t"], name=f"t{table}").wait()
            results += [[*merged.keys.tolist(), *merged.values.flatten().tolist()]]
        return results

    for route in ("rows", "dense", "auto"):
        assert job(3, program, Settings(sparse=route)) == [[[3, 0.0, 0.0]] * 2] * 3


def test_a_stall_names_the_tables() -> None:
    def program(engine: Any) -> None:
        part = Rows(np.array([0]), np.ones((1, 8)), 4)
        SparseExchange(engine, [part] * 2, ["users", "items"], name="036c.sparse.0").wait()

    job(2, program)
    assert labels.label_of("grouped_allreduce.036c.sparse.0") == "rows of the gradients of users and 1 more"


def test_a_process_set() -> None:
    def program(engine: Any) -> list[int]:
        some = add_process_set([0, 2])
        if engine.rank == 1:
            return []
        part = Rows(np.array([engine.rank]), np.ones((1, 1)), 3)
        number = some.process_set_id
        (merged,) = SparseExchange(engine, [part], ["t"], name="t", set_id=number, average=True).wait()
        assert merged.values.tolist() == [[0.5], [0.5]]
        return merged.keys.tolist()

    assert job(3, program) == [[0, 2], [], [0, 2]]


@pytest.mark.parametrize("route", ["auto", "rows"])
def test_with_a_rank_that_has_joined(route: str) -> None:
    """After a join, only all-reduces work."""

    def program(engine: Any) -> None:
        if engine.rank == 0:
            for name in ("a", "b"):
                part = Rows(np.array([5, 1, 5]), np.ones((3, 2)), 1000)
                exchange = SparseExchange(engine, [part], ["t"], name=name, average=True)
                (merged,) = exchange.wait()
                assert merged.keys.tolist() == [1, 5]
                assert merged.values.tolist() == [[0.5, 0.5], [1.0, 1.0]]
                assert exchange.routes == ["dense"]
        collectives.join(engine)

    job(2, program, Settings(sparse=route))


@pytest.mark.parametrize("bad", [-1, 9])
def test_a_row_that_is_not_there(bad: int) -> None:
    """The rank with the bad row raises, as do the ranks that wait for it. The job continues."""

    def program(engine: Any) -> None:
        part = Rows(np.array([bad if engine.rank else 2]), np.ones((1, 2)), 9)
        kind = ArgumentError if engine.rank else CollectiveError
        with pytest.raises(kind, match=r"rows .* on rank 1 .* the table has 9"):
            SparseExchange(engine, [part], ["words"], name="t").wait()
        good = Rows(np.array([2]), np.ones((1, 2)), 9)
        assert SparseExchange(engine, [good], ["words"], name="t").wait()[0].values.tolist() == [[2.0, 2.0]]

    job(2, program)


def test_memory_grows_with_the_rows_not_with_the_table() -> None:
    size, count, columns = 3, 5000, 16
    table = 10_000_000

    def program(engine: Any) -> None:
        keys = np.random.default_rng(engine.rank).integers(0, table, count)
        part = Rows(keys, np.ones((count, columns), np.float32), table)
        SparseExchange(engine, [part], ["t"], name="t").wait()

    tracemalloc.start()
    try:
        job(size, program)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < table * columns * 4 / 16  # all ranks of this process together, with their shared memory
