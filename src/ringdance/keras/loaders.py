"""Image and table loaders for ``model.fit``."""

from __future__ import annotations

from typing import Any

from ringdance.data.tables import Table
from ringdance.keras.batches import BatchSequence
from ringdance.training.loaders.binding import arrays


def image_loader(dataset: Any, batch_size: int, **options: Any) -> BatchSequence:
    """Return a loader of this rank's part of each batch, for ``model.fit`` on any backend.

    All ranks must call this function, which compares their arguments. The loader yields images (n, size,
    size, 3) as uint8, labels (n,) as int64, and sample weights. The weights scale each rank's loss so that
    the average of the ranks' gradients is the mean over the samples of all ranks, even for the last batch of
    an epoch, which may be short::

        loader = hvd.image_loader(dataset, 32)
        model.fit(loader, epochs=90, shuffle=False, callbacks=[loader.callback, ...])

    ``fit`` expects the same number of batches in each of its epochs. After ``loader.set_epoch(epoch,
    position)``, finish this epoch in a separate call: ``fit(..., initial_epoch=epoch, epochs=epoch + 1)``.

    Args:
        dataset: A ``ringdance.data.Dataset`` or ``Synthetic``.
        batch_size: Images per batch on each rank.
        options: Options of ``ringdance.data.Loader`` (``image_size``, ``augment``, ``transform``,
            ``shuffle``, ``seed``, ``threads``, ``prefetch``, ``drop_last``, ``read_bytes``) and
            ``process_set``.
    """
    loader = arrays.image_loader(dataset, batch_size, **options)
    return BatchSequence(loader, lambda batch: batch.images)


def table_loader(table: Table, batch_size: int, **options: Any) -> BatchSequence:
    """Return a loader of this rank's part of each batch, for ``model.fit`` on any backend.

    All ranks must call this function, which compares their arguments. The loader yields a mapping with "ids"
    (n, fields) as int64 and "values" (n, fields) as float32, labels (n,) as float32, and sample weights. The
    remarks on weights and ``fit`` in ``image_loader`` also apply here. In a custom training loop, use
    ``loader.loader``, which yields ``ringdance.data.TableBatch`` objects with NumPy arrays::

        loader = hvd.table_loader(Table.open("/data/criteo"), 1024)
        model.fit(loader, epochs=3, shuffle=False, callbacks=[loader.callback, ...])

    Args:
        table: A ``ringdance.data.Table``.
        batch_size: Rows per batch on each rank.
        options: Options of ``ringdance.data.TableLoader`` (``shuffle``, ``seed``, ``threads``, ``prefetch``,
            ``drop_last``) and ``process_set``.
    """
    loader = arrays.table_loader(table, batch_size, **options)
    return BatchSequence(loader, lambda batch: {"ids": batch.ids, "values": batch.values})
