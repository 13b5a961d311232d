"""table_loader for torch: each row once over all ranks, tensors without copies, arguments compared."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ringdance.torch as hvd
from ringdance.data import Table
from ringdance.data.tables import Rows
from ringdance.data.tables.writing import TableWriter, write_index
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LENGTH = 1000


@pytest.fixture(scope="module")
def table() -> Table:
    """Return rows whose ids are their numbers."""
    path = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))
    if RANK == 0:
        ids = np.stack([np.arange(LENGTH), np.arange(LENGTH)], axis=1)
        with TableWriter(path / "all.npy", "rows", LENGTH, 2) as file:
            file.write(Rows(np.zeros(LENGTH, np.float32), ids, ids.astype(np.float32)))
        write_index(path, "train", "rows", 2, LENGTH, [file.written])
    hvd.barrier()
    return Table.open(path)


def test_mean_over_ranks_is_that_of_the_global_batch(table: Table) -> None:
    loader = hvd.table_loader(table, 64, seed=2)
    loader.set_epoch(1)
    seen: list[int] = []
    for batch in loader:
        mine = batch.ids[:, 0] if batch.weight else batch.ids[:0, 0]
        whole = torch.cat(hvd.allgather_object(mine))
        assert len(whole) == batch.count
        mean = hvd.allreduce(batch.values[:, 0].mean() * batch.weight)
        torch.testing.assert_close(mean, whole.float().mean())
        seen += whole.tolist()
        assert len(seen) == batch.position
        assert batch.ids.dtype == torch.int64
        assert batch.labels.dtype == torch.float32
    assert seen != sorted(seen) == list(range(LENGTH))


def test_tensors_are_what_was_read(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = Table.read
    monkeypatch.setattr(Table, "read", lambda *given: read.append(original(*given)) or read[-1])
    batch = next(iter(hvd.table_loader(table, 64)))
    assert batch.ids.data_ptr() in [rows.ids.ctypes.data for rows in read]
    assert batch.values.data_ptr() in [rows.values.ctypes.data for rows in read]


def test_ranks_with_other_tables_are_told(table: Table) -> None:
    if SIZE == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(MismatchError, match="the table's size"):
        hvd.table_loader(replace(table, table_size=LENGTH + RANK), 64)
