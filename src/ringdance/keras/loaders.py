"""Loaders for ``model.fit``."""

from __future__ import annotations

from typing import Any

from ringdance.data.tables import Table
from ringdance.keras.batches import BatchSequence
from ringdance.training.loaders.binding import arrays


def image_loader(dataset: Any, batch_size: int, **options: Any) -> BatchSequence:
    """Return a loader of this rank's part of each batch, for ``model.fit`` on any backend.

    A collective call: all ranks make it, and it compares their arguments. It gives images (n, size, size, 3)
    uint8, labels (n,) int64, and weights of the samples: with them the average of the ranks' gradients is the
    mean over the samples of all ranks, also in the last batch of an epoch, which may be short::

        loader = hvd.image_loader(dataset, 32)
        model.fit(loader, epochs=90, shuffle=False, callbacks=[loader.callback, ...])

    ``fit`` reckons with equally many batches in all its epochs: after ``loader.set_epoch(epoch, position)``
    finish that epoch in a call of its own, ``fit(..., initial_epoch=epoch, epochs=epoch + 1)``.

    Args:
        dataset: a ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: images for each rank in each batch.
        options: those of ``ringdance.data.Loader``: ``image_size``, ``augment``, ``transform``, ``shuffle``,
            ``seed``, ``threads``, ``prefetch``, ``drop_last``, ``read_bytes``; and ``process_set``.
    """
    loader = arrays.image_loader(dataset, batch_size, **options)
    return BatchSequence(loader, lambda batch: batch.images)


def table_loader(table: Table, batch_size: int, **options: Any) -> BatchSequence:
    """Return a loader of this rank's part of each batch, for ``model.fit`` on any backend.

    A collective call: all ranks make it, and it compares their arguments. It gives a mapping with "ids"
    (n, fields) int64 and "values" (n, fields) float32, labels (n,) float32, and weights of the samples: see
    ``image_loader``, whose remarks on ``fit`` hold here. A loop of your own takes ``loader.loader``, which
    yields ``ringdance.data.TableBatch`` of NumPy arrays::

        loader = hvd.table_loader(Table.open("/data/criteo"), 1024)
        model.fit(loader, epochs=3, shuffle=False, callbacks=[loader.callback, ...])

    Args:
        table: a ``ringdance.data.Table``.
        batch_size: rows for each rank in each batch.
        options: those of ``ringdance.data.TableLoader``: ``shuffle``, ``seed``, ``threads``, ``prefetch``,
            ``drop_last``; and ``process_set``.
    """
    loader = arrays.table_loader(table, batch_size, **options)
    return BatchSequence(loader, lambda batch: {"ids": batch.ids, "values": batch.values})
