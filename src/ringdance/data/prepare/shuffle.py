"""Shuffle more rows than fit in memory, in two passes over the data.

Note [Shuffled by hashes]: Each row has a key, a hash of its file number, its chunk number and its row number
in the chunk. The key determines the row's output file. Pass 1 parses chunks and writes the rows of
each chunk as a run, sorted by output file. Pass 2 collects each output file's rows from all runs, and writes
them in a random order that is seeded with the file's number. The result therefore depends only on the source,
not on the number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.files import npy, write_whole
from ringdance.data.prepare.chunks import SourceFile, parse
from ringdance.data.prepare.plan import DAMAGE, read_plan, record, state, unchanged
from ringdance.data.tables import criteo
from ringdance.data.tables.rows import Array, Rows, dtype
from ringdance.data.tables.writing import TableWriter

_WRITTEN = 1 << 14  # number of rows to encode per call
_SEED = 1
_HALF = np.uint64(32)  # the upper 32 bits of a key choose the split, the lower 32 bits the file


@dataclass(frozen=True)
class ShufflePlan:
    """The plan of a shuffle, stored as ``.prepare/criteo.json``.

    Attributes:
        files: Source files.
        names: Names of the output files. Those for validation come first.
        held: Number of output files for validation.
        format: "rows" or "tfrecord".
        table_size: Upper bound of the ids, exclusive.
        validation: Fraction of group 0's rows that is held out for validation.
        max_broken: Maximum number of broken rows to leave out. If None, 1% of all rows.
        chunk: Number of bytes to parse at a time.
    """

    files: Sequence[SourceFile]
    names: Sequence[str]
    held: int
    format: str
    table_size: int
    validation: float
    max_broken: int | None
    chunk: int

    @classmethod
    def read(cls, destination: Path) -> ShufflePlan | None:
        """Read a directory's plan. Returns None if it does not exist."""
        return read_plan(
            state(destination) / "criteo.json",
            lambda about: cls(**about | {"files": [SourceFile(**file) for file in about["files"]]}),
        )

    def units(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the file number, unit number and record name of each unit of work in pass 1."""
        for number, file in enumerate(self.files):
            for unit in file.units(self.chunk):
                yield number, unit, Path(f"unit.{number}.{unit}.json")

    def file_of(self, keys: Array, group: int) -> Array:
        """Return the output file's number for each key. All keys must belong to rows in ``group``."""
        share, low = 1.0 if group else self.validation, keys & np.uint64((1 << 32) - 1)
        counts = np.array([len(self.names) - self.held, self.held], np.uint64)
        chosen = ((keys >> _HALF) < share * 2.0**32).astype(np.int64)
        return np.where(chosen, 0, self.held) + (low * counts[chosen] >> _HALF).astype(np.int64)


def is_scattered(destination: Path, note: Path) -> bool:
    """Return True if a unit of pass 1 is complete and its runs are unchanged."""
    directory = state(destination)
    try:
        runs = json.loads((directory / note).read_text())
        return all(unchanged(directory, run["crc32c"]) for run in runs)
    except (FileNotFoundError, *DAMAGE):
        return False


def scatter(destination: Path, number: int, unit: int, note: Path) -> tuple[int, int]:
    """Parse a unit, and write its chunks as sorted runs. Returns the numbers of rows and bytes."""
    plan = ShufflePlan.read(destination)
    assert plan is not None
    directory = state(destination)
    file, runs, total = plan.files[number], list[dict[str, Any]](), 0
    for chunk, data, size in file.read(unit, plan.chunk):
        fields, allowed = plan.files[0].fields, plan.max_broken or 0
        rows, numbers, broken = parse(file, data, fields, plan.table_size, allowed)
        keys = criteo.mixed(numbers.astype(np.uint64) | np.uint64(number << 44 | chunk << 24))
        files = plan.file_of(keys, file.group)
        ends = np.cumsum(np.append(0, np.bincount(files, minlength=len(plan.names))))
        name, total = f"sorted.{number}.{chunk}", total + size
        sorted_rows = rows.packed()[np.argsort(files, kind="stable")]
        arrays = {f"{name}.rows.npy": sorted_rows, f"{name}.ends.npy": ends}
        checksums = {path: write_whole(directory / path, npy(array)) for path, array in arrays.items()}
        count = len(numbers) + len(broken)
        runs.append({"name": name, "rows": count, "broken": broken, "crc32c": checksums})
    write_whole(directory / note, json.dumps(runs).encode())
    return sum(run["rows"] for run in runs), total


def write_cuts(destination: Path, names: Sequence[str]) -> Array:
    """Write the boundaries of each output file's rows in all runs. Returns the row count per file."""
    directory = state(destination)
    ends = np.stack([np.load(directory / f"{name}.ends.npy") for name in names])
    write_whole(directory / "cuts.npy", npy(ends))
    write_whole(directory / "runs.json", json.dumps(names).encode())
    counts: Array = np.diff(ends).sum(0)
    return counts


def gather(destination: Path, number: int) -> tuple[int, int]:
    """Write an output file from its rows in all runs. Returns its row count, as samples and as work."""
    plan, directory = ShufflePlan.read(destination), state(destination)
    assert plan is not None
    cuts = np.load(directory / "cuts.npy", mmap_mode="r")[:, number : number + 2].tolist()
    fields, path, at = plan.files[0].fields, destination / plan.names[number], 0
    rows = np.empty(sum(end - begin for begin, end in cuts), dtype(fields))
    for name, (begin, end) in zip(json.loads((directory / "runs.json").read_text()), cuts, strict=True):
        of_run = np.load(directory / f"{name}.rows.npy", mmap_mode="r")
        rows[at : (at := at + end - begin)] = of_run[begin:end]
    order = np.random.RandomState([_SEED, number]).permutation(len(rows))
    with TableWriter(path, plan.format, len(rows), fields) as writer:
        for begin in range(0, len(rows), _WRITTEN):
            writer.write(Rows.of(rows[order[begin : begin + _WRITTEN]]))
    written = writer.written
    record(destination, written.file, "offsets", written.offsets)
    return len(rows), len(rows)
