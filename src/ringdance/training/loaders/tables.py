"""A loader of a table's rows for the ranks of a job."""

from __future__ import annotations

from typing import Any

from ringdance.data.tables import Table, TableLoader
from ringdance.training.loaders.input_check import watch_training
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import check_plan

__all__ = ["table_loader"]


def table_loader(table: Table, batch_size: int, **options: Any) -> TableLoader:
    """Return a loader of this rank's part of each batch, as NumPy arrays.

    A collective call: all ranks make it, and it compares their arguments. Each iteration yields the rest of
    an epoch as ``ringdance.data.TableBatch``.

    Args:
        table: a ``ringdance.data.Table``.
        batch_size: rows for each rank in each batch.
        options: those of ``ringdance.data.TableLoader``: ``shuffle``, ``seed``, ``threads``, ``prefetch``;
            and ``process_set``.
    """
    return watch_training(make_table_loader(table, batch_size, **options))


def make_table_loader(
    table: Table, batch_size: int, *, shuffle: bool = True, seed: int = 0, threads: int = 1,
    prefetch: int = 2, process_set: ProcessSet = global_process_set,
) -> TableLoader:
    """Return the loader that the bindings adapt and watch. A collective call of all ranks of the set.

    Args:
        table: a ``ringdance.data.Table``.
        batch_size: rows for each rank in each batch.
        shuffle: another order of the blocks of 256 rows in each epoch; otherwise that of the files.
        seed: of the order.
        threads: that read and parse.
        prefetch: batches that are prepared ahead.
        process_set: the ranks among which rows are divided.

    Raises:
        ArgumentError: an argument is wrong.
        MismatchError: the ranks gave different arguments or tables; raised on all.
    """
    same = {
        "the number of rows": len(table), "the number of fields": table.fields,
        "the table's size": table.table_size, "batch_size": batch_size, "shuffle": shuffle, "seed": seed,
    }  # fmt: skip
    rank, size = check_plan("pad", same, process_set)
    return TableLoader(
        table, batch_size, shuffle=shuffle, seed=seed, rank=rank, size=size, threads=threads,
        prefetch=prefetch,
    )
