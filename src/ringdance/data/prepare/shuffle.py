"""Shuffle more rows than memory holds: ``python -m ringdance.data.prepare.shuffle DST RUN PASS``.

Note [Shuffled by sorting]: each row has a key, a hash of its file, its chunk and its number there. The order
by keys is a permutation that depends on the source alone. Pass 1 parses chunks and writes each as a run that
is sorted by class and key. Between the passes the keys are found that divide the order into files of the
sizes wanted. Pass 2 reads for each file what every run has between two keys, and writes it in the order of
another hash. Without ``--balance`` all rows are of one class; with it, clicks and others are divided apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ringdance.data.files import npy, write_whole
from ringdance.data.prepare.chunks import SourceFile, parse
from ringdance.data.prepare.plan import finished, state
from ringdance.data.prepare.work import Report, run_process, taken
from ringdance.data.tables import criteo
from ringdance.data.tables.rows import Array, Rows
from ringdance.data.tables.table import TableFile
from ringdance.data.tables.writing import TableWriter, Written

_WRITTEN = 1 << 14  # rows that are encoded at once


@dataclass(frozen=True)
class ShufflePlan:
    """What is to be done with which files: ``.prepare/criteo.json``.

    Attributes:
        files: of the source.
        format: "rows", "tfrecord" or "libsvm".
        shards: files of train; 0: by size.
        table_size: ids are below it.
        balance: whether each file has the same share of clicks.
        validation: share of the rows.
        max_broken: rows that may be left out; None: one in a hundred.
        chunk: bytes that are parsed at once.
    """

    files: Sequence[SourceFile]
    format: str
    shards: int
    table_size: int
    balance: bool
    validation: float
    max_broken: int | None
    chunk: int

    @classmethod
    def read(cls, destination: Path) -> ShufflePlan | None:
        """Read the plan of a directory; None if there is none."""
        try:
            about = json.loads((state(destination) / "criteo.json").read_text())
        except FileNotFoundError:
            return None
        return cls(**about | {"files": [SourceFile(**one) for one in about["files"]]})

    def units(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the work of pass 1: number of the file, of the unit, and the name of what is noted of it."""
        for number, file in enumerate(self.files):
            for unit in file.units(self.chunk):
                yield number, unit, Path(f"unit.{number}.{unit}.json")


@dataclass(frozen=True)
class OutputFile:
    """A file that pass 2 writes: ``.prepare/outputs.json``.

    Attributes:
        name: such as "train-00000-of-00008.npy".
        rows: how many it has.
        parts: of each run: its name, and begin and end of rows there, of each class.
    """

    name: str
    rows: int
    parts: Sequence[tuple[str, Sequence[tuple[int, int]]]]

    def written(self, destination: Path) -> Written:
        """Return what was noted of it when it was complete."""
        about = finished(destination, self.name) or {}
        return Written(TableFile(**about["file"]), np.load(state(destination) / f"{self.name}.offsets.npy"))


def scatter(destination: Path, plan: ShufflePlan, number: int, unit: int, note: Path, report: Report) -> None:
    """Parse a unit of a file, and write its chunks as sorted runs."""
    file, runs = plan.files[number], []
    for chunk, data, size in file.read(unit, plan.chunk):
        fields, allowed = plan.files[0].fields, plan.max_broken or 0
        rows, numbers, broken = parse(file, data, fields, plan.table_size, allowed)
        keys = criteo.mixed(numbers.astype(np.uint64) | np.uint64(number << 44 | chunk << 24))
        clicks = (rows.labels > 0.5) if plan.balance else np.zeros(len(keys), bool)
        order = np.lexsort((keys, clicks))
        name = f"sorted.{number}.{chunk}"
        _save(destination, f"{name}.keys.npy", keys[order])
        _save(destination, f"{name}.rows.npy", rows.packed()[order])
        classes, count = [int((~clicks).sum()), int(clicks.sum())], len(numbers) + len(broken)
        runs.append({"name": name, "rows": count, "classes": classes, "broken": broken})
        report(count, size)
    write_whole(state(destination) / note, json.dumps(runs).encode())


def _save(destination: Path, name: str, array: Array) -> None:
    write_whole(state(destination) / name, npy(array))


def divide(keys: Sequence[Array], ranks: Array) -> Array:
    """Return where sorted runs are cut so that so many keys are before the cuts.

    Args:
        keys: of each run, sorted, uint64; no key is there twice.
        ranks: shape (cuts,), int64: from 0 to the number of keys.

    Returns:
        Shape (cuts, runs), int64.
    """
    low, high = np.zeros(len(ranks), np.uint64), np.full(len(ranks), np.iinfo(np.uint64).max)
    for _ in range(64):  # the smallest bound with as many keys below it
        middle = low + (high - low) // np.uint64(2)
        enough = sum((np.searchsorted(one, middle) for one in keys), np.zeros(len(ranks), np.int64)) >= ranks
        low, high = np.where(enough, low, middle + np.uint64(1)), np.where(enough, middle, high)
    return np.stack([np.searchsorted(one, high) for one in keys], axis=1)


def gather(destination: Path, plan: ShufflePlan, output: OutputFile, report: Report) -> None:
    """Write a file from what the runs have for it."""
    keys: list[Array] = []
    found: list[Array] = []
    directory = state(destination)
    for name, ranges in output.parts:
        for kind, pieces in (("keys", keys), ("rows", found)):
            of_run = np.load(directory / f"{name}.{kind}.npy", mmap_mode="r")
            pieces += [of_run[begin:end] for begin, end in ranges]
    order = np.argsort(criteo.mixed(np.concatenate(keys)))
    rows, fields = np.concatenate(found), plan.files[0].fields
    with TableWriter(destination / output.name, plan.format, output.rows, fields) as writer:
        for at in range(0, output.rows, _WRITTEN):
            some = order[at : at + _WRITTEN]
            writer.write(Rows.of(rows[some]))
            report(len(some), len(some))
    _save(destination, f"{output.name}.offsets.npy", writer.written.offsets)
    write_whole(directory / f"{output.name}.json", json.dumps({"file": asdict(writer.written.file)}).encode())


def work(destination: Path, run: str, step: str, report: Report) -> None:
    """Do what is left of a pass and no other process has taken.

    Args:
        destination: directory of the data set.
        run: name of this run.
        step: "1" or "2".
        report: takes rows and bytes.
    """
    plan = ShufflePlan.read(destination)
    assert plan is not None
    if step == "1":
        for number, unit, note in plan.units():
            if not (state(destination) / note).exists() and taken(destination, run, note.name):
                scatter(destination, plan, number, unit, note, report)
        return
    for output in read_outputs(destination):
        if not finished(destination, output.name) and taken(destination, run, output.name):
            gather(destination, plan, output, report)


def read_outputs(destination: Path) -> list[OutputFile]:
    """Read what pass 2 is to write."""
    return [OutputFile(**one) for one in json.loads((state(destination) / "outputs.json").read_text())]


if __name__ == "__main__":
    sys.exit(run_process(work, sys.argv[1:]))
