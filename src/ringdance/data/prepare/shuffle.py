"""Shuffle more rows than memory holds: ``python -m ringdance.data.prepare.shuffle DST RUN PASS``.

Note [Shuffled by sorting]: each row has a key, a hash of its file, its chunk and its number there. The order
by keys is a permutation that depends on the source alone. Pass 1 parses chunks and writes each as a run that
is sorted by class and key. Between the passes the keys are found that divide the order into files of the
sizes wanted. Pass 2 reads for each file what every run has between two keys, and writes it in the order of
another hash. Without ``--balance`` all rows are of one class; with it, clicks and others are divided apart.

Of more runs than MOST_RUNS each file would have a few rows only, so that MERGED of them at a time are merged
into one before. This changes no byte of the result, as no key is there twice. One run is open at a time, and
keys of one are in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringdance.data.files import ShardWriter, npy, write_whole
from ringdance.data.prepare.chunks import SourceFile, parse
from ringdance.data.prepare.plan import DAMAGE, finished, read_plan, state, unchanged
from ringdance.data.prepare.work import Report, run_process, taken
from ringdance.data.tables import criteo
from ringdance.data.tables.rows import Array, Rows, dtype, header
from ringdance.data.tables.table import TableFile
from ringdance.data.tables.writing import TableWriter, Written
from ringdance.errors import ArgumentError

MOST_RUNS, MERGED = 1024, 128
_WRITTEN = 1 << 14  # rows that are encoded at once
_PIECE = 1 << 18  # rows that are merged at once: 85 MB
_NEAR = 12  # bits: that many keys are sorted to find one


class Run(NamedTuple):
    """Rows that are sorted by class and key: ``NAME.keys.npy`` and ``NAME.rows.npy``.

    Attributes:
        name: of its files, without the end.
        classes: rows of each class.
    """

    name: str
    classes: Sequence[int]


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
        return read_plan(
            state(destination) / "criteo.json",
            lambda about: cls(**about | {"files": [SourceFile(**one) for one in about["files"]]}),
        )

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
        group: of its rows; ``runs.GROUP.json`` has the names of the runs.
        number: of its rows in ``cuts.GROUP.npy``, shape (files + 1, classes, runs): begins, ends in the next.
    """

    name: str
    rows: int
    group: int
    number: int

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
        checksums = {
            **_save(destination, f"{name}.keys.npy", keys[order]),
            **_save(destination, f"{name}.rows.npy", rows.packed()[order]),
        }
        classes, count = [int((~clicks).sum()), int(clicks.sum())], len(numbers) + len(broken)
        runs.append(
            {"name": name, "rows": count, "classes": classes, "broken": broken, "crc32c": checksums}
        )
        report(count, size)
    write_whole(state(destination) / note, json.dumps(runs).encode())


def _save(destination: Path, name: str, array: Array) -> dict[str, int]:
    return {name: write_whole(state(destination) / name, npy(array))}


def _is_sorted(directory: Path, note: Path, merged: Collection[str]) -> bool:
    """Whether a unit is done: its note is there, and its runs are merged, or as they were written."""
    try:
        runs = json.loads((directory / note).read_text())
        return all(run["name"] in merged or unchanged(directory, run.get("crc32c", {})) for run in runs)
    except (FileNotFoundError, *DAMAGE):
        return False


def _merged_names(destination: Path) -> set[str]:
    """Return the runs that an interrupted run has merged and removed."""
    try:
        groups = json.loads((state(destination) / "merge.json").read_text())
        return {run[0] for name, runs in groups if is_merged(destination, name) for run in runs}
    except (FileNotFoundError, *DAMAGE):
        return set()


def divide(keys: Callable[[], Iterable[Array]], ranks: Array) -> Array:
    """Return where sorted runs are cut so that so many keys are before the cuts.

    Args:
        keys: iterates over the runs, three times: keys of each, sorted, uint64; no key is there twice.
        ranks: shape (cuts,), int64: from 0 to the number of keys.

    Returns:
        Shape (cuts, runs), int64.
    """
    bits = max(8, int(ranks.max()).bit_length() - _NEAR)
    shift, buckets = np.uint64(64 - bits), 1 << bits  # a key's first bits are its bucket
    counts = sum(np.bincount((one >> shift).view(np.int64), minlength=buckets) for one in keys())
    ends = np.cumsum(counts)
    bucket = np.minimum(np.searchsorted(ends, ranks, "right"), buckets - 1)
    wanted = np.zeros(buckets, bool)
    wanted[bucket] = True
    last = np.array([np.iinfo(np.uint64).max], np.uint64)
    near = np.sort(np.concatenate([*(one[wanted[(one >> shift).view(np.int64)]] for one in keys()), last]))
    first = np.searchsorted(near, bucket.astype(np.uint64) << shift)
    bounds = near[first + ranks - (ends - counts)[bucket]]
    return np.stack([np.searchsorted(one, bounds) for one in keys()], axis=1)


def cuts(directory: Path, runs: Sequence[Run], kind: int, ranks: Array) -> Array:
    """Return where the rows of a class begin, and where they are cut: as :func:`divide` does, in the runs."""
    begins = [sum(run.classes[:kind]) for run in runs]

    def keys() -> Iterator[Array]:
        for run, begin in zip(runs, begins, strict=True):
            found = np.load(directory / f"{run.name}.keys.npy", mmap_mode="r")
            yield np.asarray(found[begin : begin + run.classes[kind]])

    return divide(keys, ranks) + np.array(begins)


def _between(directory: Path, names: Sequence[str], begins: Array, ends: Array) -> tuple[Array, Array]:
    """Return keys and rows that runs have between two cuts, shape (classes, runs)."""

    def joined(kind: str) -> Array:
        found, at = np.empty(0), 0
        for name, *ranges in zip(names, *begins, *ends, strict=True):
            of_run = np.load(directory / f"{name}.{kind}.npy", mmap_mode="r")
            if not at:
                found = np.empty(int((ends - begins).sum()), of_run.dtype)  # joining needs twice that
            half = len(ranges) // 2
            for begin, end in zip(ranges[:half], ranges[half:], strict=True):
                found[at : (at := at + end - begin)] = of_run[begin:end]
        return found

    return joined("keys"), joined("rows")


def merge(destination: Path, fields: int, name: str, runs: Sequence[Run], report: Report) -> None:
    """Merge runs into one, and remove them; it is complete when ``NAME.json`` has its checksums."""
    directory, names = state(destination), [run.name for run in runs]
    classes = np.sum([run.classes for run in runs], axis=0).tolist()
    about = header(sum(classes), np.dtype(np.uint64)), header(sum(classes), dtype(fields))
    ends = [directory / f"{name}.{kind}.npy" for kind in ("rows", "keys")]
    with ShardWriter(ends[0]) as rows_file, ShardWriter(ends[1]) as keys_file:
        keys_file.write(about[0])
        rows_file.write(about[1])
        for number, total in enumerate(classes):
            found = cuts(directory, runs, number, np.array([*range(0, total, _PIECE), total]))
            for begin, end in pairwise(found[:, None]):
                keys, rows = _between(directory, names, begin, end)
                order = np.argsort(keys)
                keys_file.write(keys[order].tobytes())
                rows_file.write(rows[order].tobytes())
                report(len(order), len(order))
    checksums = {ends[0].name: rows_file.crc32c, ends[1].name: keys_file.crc32c}
    write_whole(directory / f"{name}.json", json.dumps(checksums).encode())
    for run in runs:
        for kind in ("keys", "rows"):
            (directory / f"{run.name}.{kind}.npy").unlink()


def gather(destination: Path, plan: ShufflePlan, output: OutputFile, report: Report) -> None:
    """Write a file from what the runs have for it."""
    directory = state(destination)
    names = json.loads((directory / f"runs.{output.group}.json").read_text())
    found = np.load(directory / f"cuts.{output.group}.npy", mmap_mode="r")
    keys, rows = _between(directory, names, *found[output.number : output.number + 2])
    order, fields = np.argsort(criteo.mixed(keys)), plan.files[0].fields
    path, size = destination / output.name, plan.table_size
    with TableWriter(path, plan.format, output.rows, fields, size) as writer:
        for at in range(0, output.rows, _WRITTEN):
            some = order[at : at + _WRITTEN]
            writer.write(Rows.of(rows[some]))
            report(len(some), len(some))
    checksums = _save(destination, f"{output.name}.offsets.npy", writer.written.offsets)
    about = {"file": asdict(writer.written.file), "crc32c": checksums}
    write_whole(directory / f"{output.name}.json", json.dumps(about).encode())


def work(destination: Path, run: str, step: str, report: Report) -> None:
    """Do what is left of a pass and no other process has taken.

    Args:
        destination: directory of the data set.
        run: name of this run.
        step: "1", "merge" or "2".
        report: takes rows and bytes.
    """
    plan = ShufflePlan.read(destination)
    assert plan is not None
    if step == "1":
        merged = _merged_names(destination)
        for number, unit, note in plan.units():
            if taken(destination, run, note.name) and not _is_sorted(state(destination), note, merged):
                scatter(destination, plan, number, unit, note, report)
        return
    if step == "merge":
        for name, runs in json.loads((state(destination) / "merge.json").read_text()):
            if not taken(destination, run, name):
                continue
            if not is_merged(destination, name):
                merge(destination, plan.files[0].fields, name, [Run(*one) for one in runs], report)
            else:
                _check_merged(state(destination), name)
        return
    for output in read_outputs(destination):
        if taken(destination, run, output.name) and not finished(destination, output.name):
            gather(destination, plan, output, report)


def is_merged(destination: Path, name: str) -> bool:
    """Whether a run that others are merged into is complete."""
    return (state(destination) / f"{name}.json").exists()


def _check_merged(directory: Path, name: str) -> None:
    """Raise an ArgumentError if a run is not as it was written; its rows are then sorted and merged again."""
    note = directory / f"{name}.json"
    with suppress(FileNotFoundError, *DAMAGE):
        if unchanged(directory, json.loads(note.read_text())):
            return
    note.unlink()
    raise ArgumentError(f"{directory / name}.*.npy are damaged: the same command makes them again")


def read_outputs(destination: Path) -> list[OutputFile]:
    """Read what pass 2 is to write."""
    return [OutputFile(**one) for one in json.loads((state(destination) / "outputs.json").read_text())]


if __name__ == "__main__":
    sys.exit(run_process(work, sys.argv[1:]))
