"""Batches of a table for ``model.fit``."""

from __future__ import annotations

from typing import Any

from ringdance.data.tables import Table, TableBatch
from ringdance.keras.batches import BatchSequence
from ringdance.training.loaders.tables import make_table_loader

__all__ = ["table_loader"]


class KerasTableLoader(BatchSequence):
    """What ``table_loader`` returns: a mapping with ids and values, labels (n,) float32, and weights."""

    def inputs(self, batch: TableBatch) -> Any:
        """Return ids (n, fields) int64 and values (n, fields) float32 by these names."""
        return {"ids": batch.ids, "values": batch.values}


def table_loader(table: Table, batch_size: int, **options: Any) -> KerasTableLoader:
    """Return a loader of this rank's part of each batch, for ``model.fit`` on any backend.

    A collective call: all ranks make it, and it compares their arguments. It gives a mapping with "ids" and
    "values", labels, and weights of the samples: see ``image_loader``, whose remarks on ``fit`` hold here. A
    loop of your own takes ``loader.loader``, which yields ``ringdance.data.TableBatch`` of NumPy arrays::

        loader = hvd.table_loader(Table.open("/data/criteo"), 1024)
        model.fit(loader, epochs=3, shuffle=False, callbacks=[loader.callback, ...])

    Args:
        table: a ``ringdance.data.Table``.
        batch_size: rows for each rank in each batch.
        options: those of ``ringdance.data.TableLoader``: ``shuffle``, ``seed``, ``threads``, ``prefetch``;
            and ``process_set``.
    """
    return KerasTableLoader(make_table_loader(table, batch_size, **options))
