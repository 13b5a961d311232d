"""fit on batches of table_loader: a model of ids and values gets the gradients of all rows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import ringdance.keras as hvd
from ringdance.data import Table
from ringdance.data.tables import Rows
from ringdance.data.tables.writing import TableWriter, write_index

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


@pytest.mark.every_backend
def test_fit_on_a_table() -> None:
    """Two epochs of a linear model match what one process computes from the global batches."""
    length, table_size = 256 + 5, 7
    random = np.random.default_rng(0)
    rows = Rows(
        (random.random(length) < 0.5).astype(np.float32), random.integers(0, table_size, (length, 3)),
        random.normal(size=(length, 3)).astype(np.float32),
    )  # fmt: skip
    with TableWriter(Path(tempfile.mkdtemp()) / "all.npy", "rows", length, 3) as file:
        file.write(rows)
    table = write_index(file.path.parent, "train", "rows", 3, table_size, [file.written])

    ids, values = keras.Input((3,), dtype="int64", name="ids"), keras.Input((3,), name="values")
    weights = keras.layers.Embedding(table_size, 1, embeddings_initializer="ones")(ids)
    output = keras.layers.Dot(1)([weights, keras.layers.Reshape((3, 1))(values)])
    model = keras.Model({"ids": ids, "values": values}, keras.layers.Reshape(())(output))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    loader = hvd.table_loader(Table.open(table.path), 20, seed=4)
    assert len(loader) == -(-length // (20 * SIZE))
    model.fit(loader, epochs=2, shuffle=False, verbose=0, callbacks=[loader.callback])

    expected = np.ones(table_size)
    for epoch in range(2):
        blocks = np.random.RandomState([4, epoch]).permutation(2)
        order = np.concatenate([np.arange(length)[256 * block : 256 * block + 256] for block in blocks])
        for start in range(0, length, 20 * SIZE):
            numbers = order[start : start + 20 * SIZE]
            error = (rows.values[numbers] * expected[rows.ids[numbers]]).sum(axis=1) - rows.labels[numbers]
            gradient = np.zeros(table_size)
            np.add.at(gradient, rows.ids[numbers], 2 * error[:, None] * rows.values[numbers] / len(numbers))
            expected -= 0.1 * gradient
    np.testing.assert_allclose(np.ravel(model.get_weights()[0]), expected, rtol=1e-4, atol=1e-5)
