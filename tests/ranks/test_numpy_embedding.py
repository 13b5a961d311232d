"""Embedding tables: replicated and sharded ones give the results of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError, CollectiveError
from ringdance.training.elastic import ObjectState, run_fn

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROWS, COLUMNS, STEPS, BATCH = 200_003, 3, 5, 60


def ids_of(step: int) -> np.ndarray:
    """Return all ranks' ids. Many occur several times, some of them on several ranks."""
    random = np.random.default_rng(step)
    return (ROWS * random.random((SIZE, BATCH, 4)) ** 9).astype(np.int64)


def gradient_of(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the gradient of the batch mean of the sum of x^3 + x over all looked-up numbers x."""
    gradient = np.zeros_like(rows)
    np.add.at(gradient, places.reshape(-1), (3 * rows[places] ** 2 + 1).reshape(-1, COLUMNS) / len(places))
    return gradient


def trained(table: hvd.EmbeddingTable) -> None:
    for step in range(STEPS):
        parts = np.array_split(ids_of(step)[RANK], 1 + step % 2)  # sometimes two passes
        gradients = [gradient_of(*table.lookup(part)) * (len(part) / BATCH) for part in parts]
        table.update(*gradients)


def alone() -> tuple[np.ndarray, np.ndarray]:
    """Train with NumPy in one process."""
    table = hvd.EmbeddingTable(ROWS, COLUMNS, rate=0.1, scale=0.5)
    for step in range(STEPS):
        gradient = np.zeros((ROWS, COLUMNS), np.float64)
        for ids in ids_of(step):
            gradient += gradient_of(table.values, ids) / SIZE
        table.accumulators += gradient**2
        table.values -= table.rate * gradient / np.sqrt(table.accumulators)
    return table.values, table.accumulators


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sharded", [False, True])
def test_sums_may_begin_at_0(sharded: bool) -> None:
    table = hvd.EmbeddingTable(8, 3, rate=0.1, accumulator=0, sharded=sharded)
    before, _ = table.lookup(np.arange(8), training=False)
    for _ in range(2):
        rows, _ = table.lookup(np.arange(4))
        gradient = np.zeros_like(rows)
        gradient[1], gradient[2, 0], gradient[3, 0] = -2e-3, 5.0, 1e-25  # its square is 0 in float32
        table.update(gradient)
    moved = table.lookup(np.arange(8), training=False)[0] - before
    step = 0.1 * (1 + 0.5**0.5)  # sum of Adagrad's first two steps, whatever the gradient
    expected = np.zeros((8, 3))
    expected[1], expected[2, 0] = step, -step
    np.testing.assert_allclose(moved, expected, atol=1e-6)


@pytest.mark.parametrize("accumulator", [-0.1, float("nan"), float("inf")])
def test_sums_that_are_none_are_refused(accumulator: float) -> None:
    with pytest.raises(ArgumentError, match=f"accumulator={accumulator}"):
        hvd.EmbeddingTable(8, 3, accumulator=accumulator)


@pytest.mark.parametrize("sharded", [False, True])
def test_steps_are_those_of_one_process(sharded: bool, tmp_path: Path) -> None:
    table = hvd.EmbeddingTable(ROWS, COLUMNS, rate=0.1, scale=0.5, sharded=sharded)
    assert len(table.values) == (len(range(RANK, ROWS, SIZE)) if sharded else ROWS)
    trained(table)
    path = hvd.broadcast_object(str(tmp_path / "table.npy"))
    table.save(path)
    saved = np.load(path)
    values, accumulators = alone()
    np.testing.assert_allclose(saved[0], values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(saved[1], accumulators, rtol=1e-5)
    other = hvd.EmbeddingTable(ROWS, COLUMNS, seed=1, sharded=not sharded)
    other.load(path)
    mine = slice(None) if sharded or SIZE == 1 else slice(RANK, None, SIZE)
    np.testing.assert_array_equal(other.values, saved[0][mine])
    np.testing.assert_array_equal(other.accumulators, saved[1][mine])
    write = table.snapshot(path)
    table.values[:] = 0
    write_other = table.snapshot(f"{path}.best.npy")  # from the same step, before the first file is written
    write()
    write_other()
    hvd.barrier()
    np.testing.assert_array_equal(np.load(path), saved)
    assert not np.load(f"{path}.best.npy")[0].any()
    hvd.barrier()


def test_errors_are_on_all_ranks(tmp_path: Path) -> None:
    table = hvd.EmbeddingTable(10, 2)
    path = hvd.broadcast_object(str(tmp_path / "table.npy"))
    with pytest.raises(FileNotFoundError):
        table.load(path)
    with pytest.raises(OSError, match="directory"):
        table.save(f"{path}/below/table.npy")
    table.save(path)
    with pytest.raises(ArgumentError, match=r"\(10, 2\) instead of \(11, 2\)"):
        hvd.EmbeddingTable(11, 2).load(path)
    rows, _ = table.lookup([1, 2, 2])
    with pytest.raises(ArgumentError, match=r"\[\(2, 2\)\]. Received: \[\(3, 2\)\]"):
        table.update(np.zeros((3, 2)))
    assert len(rows) == 2


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
@pytest.mark.parametrize(("bad", "wrong"), [
    (10, r"ids 3 to 10 \(int64\)"), (1 << 60, "ids 3 to 1152921504606846976"), (-1, "ids -1 to 3"),
    (4.5, r"ids 3 to 4 \(float64\)"),
])  # fmt: skip
def test_an_id_that_is_not_of_the_table_fails_on_all_ranks(bad: float, wrong: str) -> None:
    for sharded in (True, False):
        table = hvd.EmbeddingTable(10, 2, sharded=sharded)
        ids = [3, bad] if RANK == 1 else [3, 4]
        text = f"embedding: {wrong}.* on rank 1 .*from 0 to 9"
        with pytest.raises((ArgumentError, hvd.CollectiveError), match=text):
            table.update(np.zeros_like(table.lookup(ids)[0]))
        hvd.barrier()  # no rank exits before the others have the message


@pytest.mark.parametrize("sharded", [False, True])
def test_lookups_before_an_error_are_forgotten(sharded: bool, tmp_path: Path) -> None:
    """After a step fails between lookup and update, elastic training and a loaded table can continue."""
    table = hvd.EmbeddingTable(8, 3, rate=0.1, sharded=sharded)
    path = hvd.broadcast_object(str(tmp_path / "table.npy"))
    table.save(path)
    state, failures = ObjectState(step=0), [1]

    def train(state: ObjectState) -> None:
        while state.step < 2:
            rows, _ = table.lookup(np.arange(4 + RANK))
            if failures:
                failures.clear()
                raise CollectiveError("planted")
            table.update(np.ones_like(rows))
            state.step += 1
            state.commit()

    run_fn(train, lambda: None)(state)
    assert (failures, state.step) == ([], 2)
    table.lookup(np.arange(2))
    table.load(path)
    rows, _ = table.lookup(np.arange(3))
    table.update(np.ones_like(rows))
