"""What each part of a pipeline of TFRecords of click logs is worth: rows/s, alone and with a training step.

tf.data from the plain pipeline of tutorials on, each line with one thing more: parsing whole batches instead
of single records, files read in parallel, records kept in memory before they are shuffled, batches prepared
ahead. Then Ringdance's loader of the same rows: one row at a time, many at once, ahead of the training, with
two threads, and with files that need no parsing. The step is NumPy on one core for --step ms.
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
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the step's

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
    """Iterate over batches without end, by a tf.data pipeline that has these parts."""
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
    return ((found["label"], found["ids"], found["values"]) for found in data)


def one_by_one(made: Path) -> Iterator[Any]:
    """Parse row after row, as a loader does whose data set has one `__getitem__` for each row."""
    table = Table.open(made, "tfrecord")
    for start in itertools.cycle(range(0, len(table) - BATCH, BATCH)):
        rows = [table.read(np.array([number])) for number in range(start, start + BATCH)]
        yield tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))


def at_once(made: Path) -> Iterator[Any]:
    """Parse batch after batch in the thread that trains."""
    table = Table.open(made, "tfrecord")
    for start in itertools.cycle(range(0, len(table) - BATCH, BATCH)):
        yield table.read(np.arange(start, start + BATCH))


def loader(made: Path, split: str, threads: int) -> Iterator[Any]:
    """Iterate over shuffled batches without end, as training does."""
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
    """Write the rows to several files, in two formats."""
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
    """Return rows/s and the share of waiting for them, after an epoch: caches are full then."""
    matrix = np.ones((256, 256), np.float32)
    for _ in range(warm_up):
        next(batches)
    rows, waited, start = 0, 0.0, time.perf_counter()
    while (begun := time.perf_counter()) - start < seconds:
        rows += len(next(batches)[0])
        waited += time.perf_counter() - begun
        until = time.thread_time() + step  # of this thread: what others take from it does not count
        while time.thread_time() < until:
            matrix @ matrix
    return rows / (begun - start), waited / (begun - start)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="of the table (default: 100000)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement (default: 2)")
    parser.add_argument("--step", type=float, default=4.0, help="ms of a training step (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="of all in turn (default: 2)")
    parser.add_argument("--json", type=Path, help="write numbers and machine to this file")
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        prepare(made, given.rows)
        epoch = -(-given.rows // BATCH)
        for _ in range(given.rounds):
            for name, batches in VARIANTS.items():
                warm_up = 1 if batches is one_by_one else epoch
                alone, _ = measure(batches(made), warm_up, given.seconds, 0.0)
                found[name].append((alone, *measure(batches(made), warm_up, given.seconds, given.step / 1e3)))
    table = {
        name: [statistics.mean(column) for column in zip(*runs, strict=True)]
        for name, runs in found.items()
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
        about["rows/s alone, with the step, share of waiting"] = found
        given.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
