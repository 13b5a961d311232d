"""Rows per second for each table format on one core, compared with common readers of these files.

The rows come from ``ringdance data generate criteo``: a label, 13 numbers and 26 categories. Every contestant
returns batches of labels, ids and values from the same rows. Each runs in a separate process on one core, in
turn. Readers of CSV also hash the categories. sklearn needs rows with ascending ids and gets such a file. If
other processes use the core, compare CPU times.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import about_machine, format_table

BATCH, TABLE_SIZE, FIELDS = 1024, 1_000_000, 39
Batches = Iterator[tuple[Any, Any, Any]]


def ringdance(split: str) -> Callable[[Path], Batches]:
    def batches(made: Path) -> Batches:
        from ringdance.data import Table, TableLoader

        if split in ("csv", "libsvm"):  # without an index: the file is scanned first
            table = Table.open(made / f"{split}.{split}", table_size=TABLE_SIZE)
        else:
            table = Table.open(made, split)
        loader = TableLoader(table, BATCH)
        for epoch in range(1 << 30):
            loader.set_epoch(epoch)
            for batch in loader:
                yield batch.labels, batch.ids, batch.values

    return batches


def tensorflow(parse: str) -> Callable[[Path], Batches]:
    def batches(made: Path) -> Batches:
        import tensorflow as tf

        features = {
            "label": tf.io.FixedLenFeature((), tf.float32), "ids": tf.io.FixedLenFeature((FIELDS,), tf.int64),
            "values": tf.io.FixedLenFeature((FIELDS,), tf.float32),
        }  # fmt: skip
        defaults = [[0.0]] * 14 + [[""]] * 26

        def example(found: Any) -> Any:
            return found["label"], found["ids"], found["values"]

        def columns(lines: Any) -> Any:
            decoded = tf.io.decode_csv(lines, defaults)
            hashed = [
                13 + tf.strings.to_hash_bucket_fast(text + f"_{n}", TABLE_SIZE - 13)
                for n, text in enumerate(decoded[14:])
            ]
            numbers = tf.math.log1p(tf.maximum(tf.stack(decoded[1:14], 1), 0))
            count = tf.shape(numbers)[0]
            own = tf.tile(tf.range(13, dtype=tf.int64)[None], (count, 1))
            ids, values = tf.stack(hashed, 1), tf.ones((count, 26))
            return decoded[0], tf.concat([own, ids], 1), tf.concat([numbers, values], 1)

        if parse == "csv":
            data = tf.data.TextLineDataset(str(made / "csv.csv")).repeat().batch(BATCH).map(columns)
        else:
            data = tf.data.TFRecordDataset(str(made / "tfrecord.tfrecord")).repeat()
            if parse == "one":
                data = data.map(lambda one: example(tf.io.parse_single_example(one, features))).batch(BATCH)
            else:
                data = data.batch(BATCH).map(lambda some: example(tf.io.parse_example(some, features)))
        options = tf.data.Options()
        options.threading.private_threadpool_size = 1
        return iter(data.prefetch(2).with_options(options))

    return batches


def sklearn(made: Path) -> Batches:
    """Read slices of the file with load_svmlight_file. Converts CSR to arrays of each row's fields."""
    from sklearn.datasets import load_svmlight_file

    name = made / "sorted.libsvm"
    size, each = name.stat().st_size, 1 << 20
    while True:
        for offset in range(0, size, each):
            matrix, labels = load_svmlight_file(
                str(name), n_features=TABLE_SIZE + FIELDS, offset=offset, length=each, zero_based=False
            )
            yield labels.astype("f4"), matrix.indices.reshape(-1, FIELDS), matrix.data.astype("f4")


def pandas(made: Path) -> Batches:
    import numpy as np
    import pandas as pd

    texts = dict.fromkeys(range(14, 40), str)
    while True:
        for frame in pd.read_csv(made / "csv.csv", header=None, chunksize=16 * BATCH, dtype=texts):
            values = np.ones((len(frame), FIELDS), "f4")
            values[:, :13] = np.log1p(np.maximum(frame.iloc[:, 1:14].fillna(0).to_numpy("f4"), 0))
            ids = np.empty(values.shape, np.int64)
            ids[:, :13] = np.arange(13)
            for n in texts:
                hashed = pd.util.hash_array(frame[n].fillna("").to_numpy(), hash_key=f"{n:016}")
                ids[:, n - 1] = 13 + hashed % (TABLE_SIZE - 13)
            yield frame[0].to_numpy("f4"), ids, values


def torch(made: Path) -> Batches:
    """Read the memory-mapped file row by row, as most data sets for torch do."""
    import numpy as np
    from torch.utils.data import DataLoader, Dataset

    rows = np.load(made / "rows.npy", mmap_mode="r")

    class Rows(Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, number: int) -> Any:
            row = rows[number]
            return row["label"], row["ids"].astype(np.int64), row["values"]

    while True:
        yield from DataLoader(Rows(), BATCH, shuffle=True)


CONTESTANTS: dict[str, tuple[Callable[[Path], Batches], str, str]] = {  # batches, package, file
    "rows: ringdance": (ringdance("rows"), "ringdance", "rows.npy"),
    "rows: torch's DataLoader, row by row": (torch, "torch", "rows.npy"),
    "TFRecord: ringdance": (ringdance("tfrecord"), "google_crc32c", "tfrecord.tfrecord"),
    "TFRecord: tf.data, parse_example": (tensorflow("many"), "tensorflow", "tfrecord.tfrecord"),
    "TFRecord: tf.data, parse_single_example": (tensorflow("one"), "tensorflow", "tfrecord.tfrecord"),
    "LibSVM: ringdance": (ringdance("libsvm"), "pyarrow", "libsvm.libsvm"),
    "LibSVM: sklearn": (sklearn, "sklearn", "sorted.libsvm"),
    "CSV: ringdance": (ringdance("csv"), "pyarrow", "csv.csv"),
    "CSV: tf.data, decode_csv": (tensorflow("csv"), "tensorflow", "csv.csv"),
    "CSV: pandas": (pandas, "pandas", "csv.csv"),
}


def prepare(made: Path, count: int) -> None:
    """Write the same rows in all formats."""
    from contextlib import ExitStack

    import numpy as np

    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    from criteo_lines import criteo_lines, libsvm_lines

    from ringdance.data import planted
    from ringdance.data.tables.writing import ENDS, TableWriter, write_index

    with ExitStack() as stack:
        files = {
            form: stack.enter_context(TableWriter(made / f"{form}.{end}", form, count, FIELDS))
            for form, end in ENDS.items()
        }
        libsvm = stack.enter_context(open(made / "libsvm.libsvm", "wb"))
        ascending = stack.enter_context(open(made / "sorted.libsvm", "wb"))
        lines = stack.enter_context(open(made / "csv.csv", "wb"))
        for some in planted(count):
            rows = some.rows(TABLE_SIZE)
            ids = np.sort(rows.ids, axis=1)
            ids[:, 1:] += np.cumsum(np.diff(ids, axis=1) == 0, axis=1)
            libsvm.write(libsvm_lines(rows))
            ascending.write(libsvm_lines(rows._replace(ids=ids)))
            lines.write(criteo_lines(some))
            for file in files.values():
                file.write(rows)
    for form, file in files.items():
        write_index(made, form, form, FIELDS, TABLE_SIZE, [file.written])


def measure(name: str, made: Path, seconds: float) -> tuple[float, float]:
    """Return rows per second, and rows per second of CPU time."""
    batches = CONTESTANTS[name][0](made)
    for _ in range(8):
        next(batches)
    rows, start, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        rows += len(next(batches)[0])
    return rows / (time.perf_counter() - start), rows / (time.process_time() - used)


def in_process(name: str, made: Path, seconds: float) -> list[float] | None:
    """Call ``measure`` for a contestant in a separate process. Returns None if that fails."""
    command = [sys.executable, __file__, "--one", name, str(made), "--seconds", str(seconds)]
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120 + 10 * seconds)
    for line in done.stdout.splitlines():
        if line.startswith("rows/s "):
            return [float(word) for word in line.split()[1:]]
    print(f"{name} failed:\n{done.stderr[-600:]}", file=sys.stderr)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table (default: 200000)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time per measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all contestants (default: 2)")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), help="names of contestants")
    parser.add_argument("--json", type=Path, help="write numbers and machine to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        print("rows/s", *measure(options.one[0], Path(options.one[1]), options.seconds), flush=True)
        os._exit(0)
    missing = {CONTESTANTS[name][1] for name in options.only}
    missing = {package for package in missing if importlib.util.find_spec(package) is None}
    runs: dict[str, list[list[float]]] = {}
    sizes = {}
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        prepare(made, options.rows)
        names = [name for name in options.only if CONTESTANTS[name][1] not in missing]
        for _ in range(options.rounds):
            for name in names:
                if (result := in_process(name, made, options.seconds)) is not None:
                    runs.setdefault(name, []).append(result)
        sizes = {name: (made / CONTESTANTS[name][2]).stat().st_size / options.rows for name in runs}
    best = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)]
        for name, runs in runs.items()
    }
    print(f"{options.rows} rows, batches of {BATCH}; not installed: {', '.join(sorted(missing)) or 'none'}")
    print(format_table(
        ["", "bytes/row", "rows/s", "rows/CPU s", "MB/CPU s"],
        [[name, f"{sizes[name]:.0f}", f"{wall:,.0f}", f"{cpu:,.0f}", f"{cpu * sizes[name] / 1e6:,.0f}"]
         for name, (wall, cpu) in best.items()],
    ))  # fmt: skip
    if options.json:
        about = {"machine": about_machine(), "rows": options.rows, "rows/s, rows/CPU s": runs, "bytes": sizes}
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
