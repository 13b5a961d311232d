"""table_loader for JAX and NumPy: the same rows as arrays of each, and each row once over all ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np

import ringdance.jax as hvd
import ringdance.numpy
from ringdance.data import Table
from ringdance.data.tables import Rows
from ringdance.data.tables.writing import TableWriter

hvd.init()
LENGTH = 300


def test_batches_are_arrays_of_jax() -> None:
    name = Path(tempfile.mkdtemp()) / "all.npy"
    ids = np.stack([np.arange(LENGTH), np.arange(LENGTH)], axis=1)
    with TableWriter(name, "rows", LENGTH, 2) as file:
        file.write(Rows(np.zeros(LENGTH, np.float32), ids, ids.astype(np.float32)))
    table = Table.open(name, table_size=LENGTH)
    seen = []
    loaders = hvd.table_loader(table, 32, seed=2), ringdance.numpy.table_loader(table, 32, seed=2)
    for batch, arrays in zip(*loaders, strict=True):
        assert isinstance(batch.ids, jax.Array)
        assert isinstance(arrays.ids, np.ndarray)
        assert arrays.ids.dtype == np.int64
        assert np.array_equal(batch.ids, arrays.ids)
        assert np.array_equal(batch.values, arrays.values)
        seen += arrays.ids[:, 0].tolist() if arrays.weight else []
    assert sorted(number for mine in hvd.allgather_object(seen) for number in mine) == list(range(LENGTH))
