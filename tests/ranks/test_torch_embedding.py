"""Embedding tables train as with torch's Adagrad in one process. Their cost depends on a step's rows only."""

from __future__ import annotations

import functools
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ringdance.torch as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
COLUMNS, RATE, TOUCHED = 5, 0.1, 5_000
ROW_BYTES = 4 * COLUMNS
BIG = pytest.param(10_000_000, 1_000, marks=pytest.mark.slow)


def ids_of(step: int, rank: int, rows: int, touched: int = TOUCHED) -> Tensor:
    """Return distinct row ids. A fifth of them are among the first rows, which all ranks use."""
    random = np.random.default_rng([step, rank])
    common = random.choice(touched, touched // 5, replace=False)
    others = random.choice(rows - touched, touched - len(common), replace=False) + touched
    return torch.from_numpy(np.concatenate([common, others])).view(-1, 10)


def loss_of(ids: Tensor, embeddings: Tensor) -> Tensor:
    """Return a loss whose gradient depends on the table's values."""
    wanted = torch.sin(ids.unsqueeze(-1) * torch.arange(1.0, COLUMNS + 1))
    return (embeddings - wanted).square().sum()


def step_of(table: hvd.EmbeddingTable, ids: Tensor) -> None:
    rows, places = table.lookup(ids)
    leaf = torch.from_numpy(rows).requires_grad_()
    loss: Any = loss_of(ids, functional.embedding(torch.from_numpy(places), leaf))
    loss.backward()
    table.update(leaf.grad)


@functools.cache
def alone(rows: int, steps: int) -> np.ndarray:
    """Train torch's own sparse embedding and Adagrad on all ranks' rows in one process."""
    first = torch.from_numpy(hvd.EmbeddingTable(rows, COLUMNS).values)
    layer = nn.Embedding(rows, COLUMNS, sparse=True, _weight=first)
    adagrad = torch.optim.Adagrad(layer.parameters(), RATE, initial_accumulator_value=0.1)
    for step in range(steps):
        ids = torch.cat([ids_of(step, rank, rows) for rank in range(SIZE)])
        loss: Any = loss_of(ids, layer(ids)) / SIZE
        loss.backward()
        adagrad.step()
        adagrad.zero_grad()
    weights: np.ndarray = layer.weight.detach().numpy()
    return weights


def memory(name: str) -> int:
    """Return a memory metric of this process in bytes: VmRSS, or VmHWM, its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("rows", "steps"), [(200_000, 3), BIG])
def test_memory_and_traffic_grow_with_the_rows_of_a_step(rows: int, steps: int, sharded: bool) -> None:
    table = hvd.EmbeddingTable(rows, COLUMNS, rate=RATE, sharded=sharded)
    step_of(table, ids_of(0, RANK, rows, 50))  # allocates all buffers
    table = hvd.EmbeddingTable(rows, COLUMNS, rate=RATE, sharded=sharded)
    sent = hvd.metrics()["bytes"]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    before = memory("VmRSS")
    for step in range(steps):
        step_of(table, ids_of(step, RANK, rows))
    extra, sent = memory("VmHWM") - before, (hvd.metrics()["bytes"] - sent) / steps
    print(f"\n{rows:,} rows, sharded {sharded}: {extra / 1e6:.1f} MB, {sent:,.0f} bytes a step, rank {RANK}")
    # Memory: some copies of all ranks' rows, and the engine's chunks. A dense gradient of the big table would
    # take 200 MB.
    assert extra < 40 * SIZE * TOUCHED * (ROW_BYTES + 8) + (16 << 20)
    # Traffic: keys and gradients. If sharded, also values, and as much of each as other ranks request.
    each = 8 + (2 if sharded else 1) * ROW_BYTES
    assert SIZE == 1 or 0.9 * TOUCHED * each < sent < 1.1 * TOUCHED * each + 64
    compare(table, rows, steps)


def compare(table: hvd.EmbeddingTable, rows: int, steps: int) -> None:
    """Compare with one process. Replicas are equal bit by bit."""
    if not table.sharded:
        assert len(set(hvd.allgather_object(zlib.crc32(table.values)))) == 1
    path = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None)) / "table.npy"
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    table.save(path)
    assert memory("VmHWM") - before < 48 << 20, "a rank holds more than a part of the table"
    with hvd.pause_stall_check("one process"):
        if RANK == 0:
            saved, expected = np.load(path, mmap_mode="r")[0], alone(rows, steps)
            np.testing.assert_allclose(saved, expected, rtol=1e-3, atol=2e-5)
            first = hvd.EmbeddingTable(rows, COLUMNS).values
            assert np.count_nonzero((first != expected).any(1)) > TOUCHED
            path.unlink()
            path.parent.rmdir()
        hvd.barrier()
