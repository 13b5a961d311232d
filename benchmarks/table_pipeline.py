"""The gain from each part of an input pipeline for click logs: rows/s, alone and with a training step.

First tf.data on TFRecords, starting from the plain pipeline of tutorials and adding one part per line: parse
whole batches instead of single records, read files in parallel, cache records in memory before shuffling,
prefetch batches. Then Ringdance's loader on the same rows: one row at a time, many rows at once, ahead of
training, with two threads, and with files that need no parsing. The training step is NumPy on one core for
--step ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the training step

import numpy as np
import tensorflow as tf
from common import about_machine, format_table

from ringdance.data import Table, TableLoader, planted
from ringdance.data.tables.writing import ENDS, TableWriter, write_index

BATCH, TABLE_SIZE, FIELDS, FILES = 1024, 1_000_000, 39, 8
FEATURES = {
    "label": tf.io.FixedLenFeature((), tf.float32), "ids": tf.io.FixedLenFeature((FIELDS,), tf.int64),
    "values": tf.io.FixedLenFeature((FIELDS,), tf.float32),
}  # fmt: skip


def pipeline(made: Path, *having: str) -> Iterator[Any]:
    """Iterate endlessly over batches from a tf.data pipeline with these parts."""
    names = tf.data.Dataset.list_files(str(made / "*.tfrecord"), seed=0)
    if "parallel reads" in having:
        data = names.interleave(
            tf.data.TFRecordDataset, cycle_length=FILES, num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=False,
        )  # fmt: skip
    else:
        data = names.flat_map(tf.data.TFRecordDataset)
    if "cache" in having:
        data = data.cache()
    data = data.repeat().shuffle(10_000, seed=0)
    if "vectorised map" in having:
        data = data.batch(BATCH).map(lambda some: tf.io.parse_example(some, FEATURES))
    else:
        data = data.map(lambda one: tf.io.parse_single_example(one, FEATURES)).batch(BATCH)
    if "prefetch" in having:
        data = data.prefetch(tf.data.AUTOTUNE)
    return ((batch["label"], batch["ids"], batch["values"]) for batch in data)


def one_by_one(made: Path) -> Iterator[Any]:
    """Parse row by row, like a loader whose data set returns one row per ``__getitem__``."""
    table = Table.open(made, "tfrecord")
    for start in itertools.cycle(range(0, len(table) - BATCH, BATCH)):
        rows = [table.read(np.array([number])) for number in range(start, start + BATCH)]
        yield tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))


def at_once(made: Path) -> Iterator[Any]:
    """Parse batch by batch in the training thread."""
    table = Table.open(made, "tfrecord")
    for start in itertools.cycle(range(0, len(table) - BATCH, BATCH)):
        yield table.read(np.arange(start, start + BATCH))


def loader(made: Path, split: str, threads: int) -> Iterator[Any]:
    """Iterate endlessly over shuffled batches, as training does."""
    batches = TableLoader(Table.open(made, split), BATCH, threads=threads)
    for epoch in itertools.count():
        batches.set_epoch(epoch)
        for batch in batches:
            yield batch.labels, batch.ids, batch.values


STEPS = ("vectorised map", "parallel reads", "cache", "prefetch")
VARIANTS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "tf.data: one file, scalar map, shuffle, batch": lambda made: pipeline(made),
    "+ vectorised map: batch, then parse_example": lambda made: pipeline(made, *STEPS[:1]),
    "+ parallel reads (interleave)": lambda made: pipeline(made, *STEPS[:2]),
    "+ cache before shuffle": lambda made: pipeline(made, *STEPS[:3]),
    "+ prefetch": lambda made: pipeline(made, *STEPS),
    "all but the vectorised map": lambda made: pipeline(made, *STEPS[1:]),
    "ringdance, TFRecords: one row at a time": one_by_one,
    "+ all rows of a batch at once": at_once,
    "+ prefetch, shuffled: TableLoader": lambda made: loader(made, "tfrecord", 1),
    "+ 2 threads": lambda made: loader(made, "tfrecord", 2),
    "ringdance, rows: TableLoader": lambda made: loader(made, "rows", 1),
}


def prepare(made: Path, count: int) -> None:
    """Write the rows to several files in two formats."""
    rows = [some.rows(TABLE_SIZE) for some in planted(count)]
    whole = type(rows[0])(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))
    bounds = [count * number // FILES for number in range(FILES + 1)]
    for form in ("rows", "tfrecord"):
        written = []
        for start, stop in itertools.pairwise(bounds):
            name = made / f"{form}-{start}.{ENDS[form]}"
            with TableWriter(name, form, stop - start, FIELDS) as file:
                file.write(whole.part(start, stop))
            written.append(file.written)
        write_index(made, form, form, FIELDS, TABLE_SIZE, written)


def measure(batches: Iterator[Any], warm_up: int, seconds: float, step: float) -> tuple[float, float]:
    """Return rows/s and the share of time spent waiting for rows.

    Measures after ``warm_up`` batches, usually an epoch, when caches are full.
    """
    matrix = np.ones((256, 256), np.float32)
    for _ in range(warm_up):
        next(batches)
    rows, waited, start = 0, 0.0, time.perf_counter()
    while (begun := time.perf_counter()) - start < seconds:
        rows += len(next(batches)[0])
        waited += time.perf_counter() - begun
        until = time.thread_time() + step  # CPU time of this thread: interruptions by others do not count
        while time.thread_time() < until:
            matrix @ matrix
    return rows / (begun - start), waited / (begun - start)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: 100000)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time per measurement (default: 2)")
    parser.add_argument("--step", type=float, default=4.0, help="ms per training step (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all variants (default: 2)")
    parser.add_argument("--json", type=Path, help="write numbers and machine to this file")
    given = parser.parse_args()
    rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        prepare(made, given.rows)
        epoch = -(-given.rows // BATCH)
        for _ in range(given.rounds):
            for name, batches in VARIANTS.items():
                warm_up = 1 if batches is one_by_one else epoch
                alone, _ = measure(batches(made), warm_up, given.seconds, 0.0)
                rates[name].append((alone, *measure(batches(made), warm_up, given.seconds, given.step / 1e3)))
    table = {
        name: [statistics.mean(column) for column in zip(*runs, strict=True)]
        for name, runs in rates.items()
    }
    bound = BATCH / given.step * 1e3
    print(f"{given.rows} rows, batches of {BATCH}, a step of {given.step:g} ms: at most {bound:,.0f} rows/s")
    lines = [
        [name, f"{alone:,.0f}", f"{both:,.0f}", f"{waiting:.0%}"]
        for name, (alone, both, waiting) in table.items()
    ]
    print(format_table(["", "alone, rows/s", "with the step", "waiting"], lines))
    if given.json:
        about = {"machine": about_machine(), "rows": given.rows, "step, ms": given.step}
        about["rows/s alone, with the step, share of waiting"] = rates
        given.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
