"""``ringdance data prepare criteo``: find click logs, shuffle rows in two passes, and write an index."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from ringdance.data.files import needed, write_whole
from ringdance.data.prepare import plan as plans
from ringdance.data.prepare.chunks import PARQUET, SourceFile, plain
from ringdance.data.prepare.prepare import check_sizes
from ringdance.data.prepare.progress import PrepareProgress, amount, counted, say
from ringdance.data.prepare.shuffle import ShufflePlan, gather, is_scattered, scatter, write_cuts
from ringdance.data.prepare.work import run_tasks
from ringdance.data.tables import formats
from ringdance.data.tables.criteo import BOM
from ringdance.data.tables.formats import SUFFIXES
from ringdance.data.tables.rows import dtype
from ringdance.data.tables.table import Table, TableFile
from ringdance.data.tables.writing import ENDS, Written, write_index
from ringdance.errors import ArgumentError

SPLITS = ("train", "validation")
_PROBLEMS = "problems.tsv"
_FILE_SIZE = 256 << 20
_CHUNK, _LARGE = 64 << 20, 256 << 30
"""Chunks have _CHUNK bytes, plus _CHUNK for every _LARGE bytes of source, to limit the number of runs."""
_TRIED, _BEGINNING = 16, 1 << 22
"""Number of files to sample, and of bytes to read at the start of each, to estimate the result's size."""


def find(paths: Sequence[Path], validation: Path | None) -> list[SourceFile]:
    """Find the click-log files among the given files and in the given directories.

    Of a data set that Ringdance prepared, only the split ``train`` is used for training. Its split
    ``validation`` is used if the directory is ``validation`` or the only path.

    Raises:
        ArgumentError: No files are found, a file is given twice, or the numbers of fields differ.
    """
    entries = [(*pair, 0) for path in paths for pair in _files(path, "train")]
    if validation is None and len(paths) == 1 and (paths[0] / "validation.json").exists():
        validation = paths[0]
    if validation is not None:
        entries += [(*pair, 1) for pair in _files(validation, "validation")]
    seen: dict[Path, Path] = {}
    for path, *_ in entries:
        names = {plain(path), plain(path.resolve())}
        if other := next((seen[name] for name in names if name in seen), None):
            raise ArgumentError(f"{path} has the same rows as {other}. Leave out one of these files.")
        seen |= dict.fromkeys(names, path)
    files = [SourceFile.of(path, group, crc32c) for path, crc32c, group in entries]
    if len(kinds := {file.fields for file in files}) > 1:
        raise ArgumentError(
            f"the files have different numbers of fields, {sorted(kinds)}. Prepare them separately."
        )
    return files


def _files(path: Path, split: str) -> list[tuple[Path, int | None]]:
    """List the click-log files of a split. Includes their checksums if the directory has an index."""
    if not path.exists():
        raise ArgumentError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [(path, None)]
    if (path / f"{split}.json").exists():
        table = Table.open(path, split)
        check_sizes(path, table.files)
        return [(path / entry.name, entry.crc32c) for entry in table.files if entry.rows]
    candidates = [
        entry for entry in path.iterdir()
        if not entry.is_dir() and not re.match(r"(?i)\.|test|readme|license", entry.name)
        and plain(entry).suffix.lower() in ("", ".txt", PARQUET, *SUFFIXES)
    ]  # fmt: skip
    if others := sorted(entry.name for entry in path.iterdir() if entry not in candidates):
        say(f"not read, because of their names: {counted(others)}")
    # Spark writes _SUCCESS, which is empty, and sometimes empty partitions.
    empty = {entry for entry in candidates if entry.is_file() and not entry.stat().st_size}
    if empty and len(empty) < len(candidates):
        say(f"left out, because they are empty: {', '.join(sorted(entry.name for entry in empty))}")
        candidates = [entry for entry in candidates if entry not in empty]
    if not candidates:
        raise ArgumentError(
            f"{path} contains no click logs (day_0, .txt, .tsv, .csv, .parquet, .libsvm, .tfrecord)."
        )
    candidates.sort(key=lambda path: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", path.name)])
    return [(entry, None) for entry in candidates]


def prepare(given: argparse.Namespace) -> int:
    """Write a data set, or resume an earlier run. Returns the number of broken rows left out.

    Args:
        given: Command-line options. All paths are absolute.

    Raises:
        ArgumentError: The data set cannot be prepared. The message says what to do.
    """
    for module in ("google_crc32c", "pyarrow"):
        needed(module)
    destination: Path = given.destination
    files = find(given.source, given.validation if isinstance(given.validation, Path) else None)
    for file in files:
        if Path(file.path).resolve().is_relative_to(destination.resolve()):
            raise ArgumentError(f"{file.path} is in DST, which is overwritten. Choose another DST.")
    plans.state(destination).mkdir(parents=True, exist_ok=True)
    plan = _plan(files, given)
    with plans.locked(destination):
        _begin_or_resume(destination, plan, given.overwrite)
        if (destination / "train.json").exists():
            for split in SPLITS:
                if (destination / f"{split}.json").exists():
                    check_sizes(destination, Table.open(destination, split).files)
            say("already complete. Use --overwrite to write it again.")
            return plans.listed(destination / _PROBLEMS, b"\n")
        write_whole(plans.state(destination) / "criteo.json", json.dumps(asdict(plan)).encode())
        say(f"Pass 1 of 2: parse and sort {amount(len(files), 'file')}")
        units = [unit for unit in plan.units() if not is_scattered(destination, unit[2])]
        progress = PrepareProgress(sum(unit.size for unit in files), "rows")
        run_tasks(scatter, [(destination, *one) for one in units], given.num_proc, progress)
        runs, left_out = _runs(destination, plan)
        if not runs:
            raise ArgumentError(f"{files[0].path} and all other files in SRC have no rows.")
        counts = write_cuts(destination, runs).tolist()
        left = [n for n, name in enumerate(plan.names) if not plans.finished(destination, name)]
        rows = sum(counts[number] for number in left)
        say(f"Pass 2 of 2: write {amount(rows, 'row')} into {amount(len(left), 'file')}")
        tasks = [(destination, number) for number in left]
        run_tasks(gather, tasks, given.num_proc, PrepareProgress(rows, "rows"))
        _close(destination, plan)
        plans.remove_state(destination, keep="criteo.json")
        return left_out


def _plan(files: Sequence[SourceFile], given: argparse.Namespace) -> ShufflePlan:
    """Plan the output files. Estimates the row count from the beginnings of the source files."""
    share = 0.0 if isinstance(given.validation, Path) else given.validation
    each = _rows_in_a_byte(files, given.table_size)
    own, other = (each * sum(file.size for file in files if file.group == group) for group in (1, 0))
    held, kept, row = own + other * share, other * (1 - share), dtype(files[0].fields).itemsize
    wanted = given.shards or max(1, round(kept * row / _FILE_SIZE))
    counts = {"validation": round(wanted * held / max(kept, 1)) or int(held > 0), "train": wanted}
    names = [
        f"{split}-{shard:05}-of-{count:05}.{ENDS[given.format]}"
        for split, count in counts.items() for shard in range(count)
    ]  # fmt: skip
    chunk = round(given.chunk * (1 << 20)) or _CHUNK * (1 + sum(file.size for file in files) // _LARGE)
    return ShufflePlan(
        files, names, counts["validation"], given.format, given.table_size, share, given.max_broken, chunk
    )


def _rows_in_a_byte(files: Sequence[SourceFile], table_size: int) -> float:
    """Estimate the number of rows per byte from the beginnings of some files."""
    rows = looked_at = 0.0
    for number in np.linspace(0, len(files) - 1, min(_TRIED, len(files))).astype(int):
        file = replace(files[number], crc32c=None)
        for _, data, size in islice(file.read(file.units(_BEGINNING)[0], _BEGINNING), 1):
            count = formats.parse(file.format, data, files[0].fields, table_size)[0]
            rows += count * file.size / size
            looked_at += file.size
    return rows / max(looked_at, 1)


def _begin_or_resume(destination: Path, plan: ShufflePlan, overwrite: bool) -> None:
    """Remove the files of an earlier run from the directory, unless it had the same plan.

    Raises:
        ArgumentError: The directory contains files that this command did not write, or a data set that was
            started with other options or files, and ``overwrite`` is False.
    """
    former = None
    with suppress(ArgumentError) if overwrite else nullcontext():  # overwrite even a damaged plan
        former = ShufflePlan.read(destination)
    if not overwrite and former and replace(former, max_broken=plan.max_broken) == plan:
        return
    indexes = [path for split in SPLITS if (path := destination / f"{split}.json").exists()]
    if not overwrite and (former or indexes):
        raise ArgumentError(
            f"{destination} has a data set that was started differently. Now: {_differences(plan, former)}. "
            "To resume, use the same options and files. Otherwise, choose another DST or pass --overwrite."
        )
    own = set(former.names if former else ())
    directory = plans.state(destination)
    if (directory / "criteo.json").exists():  # otherwise, these are records of prepared images
        own |= {path.name.removesuffix(".json") for path in directory.glob("*-of-*.json")}
    for path in indexes:
        with suppress(ArgumentError):  # ignore a damaged index
            own |= {file.name for file in Table.open(destination, path.stem).files}
    present = {path.name for split in SPLITS for path in destination.glob(f"{split}-*-of-*.*")}
    if others := sorted(present - own):
        raise ArgumentError(
            f"{destination} contains files that do not belong to any index or unfinished run of this "
            f"command, such as {others[0]} ({len(others)} in total). Move or delete them, or change DST."
        )
    for name in (*present, *(f"{split}.{end}" for split in SPLITS for end in ("json", "npy"))):
        (destination / name).unlink(missing_ok=True)
    plans.remove_state(destination)


def _differences(plan: ShufflePlan, former: ShufflePlan | None) -> str:
    changes = plans.differences(plan, former, "format", "table_size", "validation") if former else []
    if former and len(plan.names) != len(former.names):
        changes.append(f"{len(plan.names)} instead of {len(former.names)} files (--shards)")
    return "; ".join(changes) or "other or changed files"


def _runs(destination: Path, plan: ShufflePlan) -> tuple[list[str], int]:
    """Write the list of broken rows. Returns the names of pass 1's runs, and the number of broken rows."""
    names, problems, total = list[str](), list[tuple[str, ...]](), 0
    for number, units in groupby(plan.units(), lambda unit: unit[0]):
        file = plan.files[number]
        first = 1 + (file.header > len(BOM))
        notes = (json.loads((plans.state(destination) / note).read_text()) for _, _, note in units)
        for run in (run for note in notes for run in note):
            problems += [(file.path, str(first + row), text) for row, text in run["broken"]]
            first, total = first + run["rows"], total + run["rows"]
            names.append(run["name"])
    plans.list_problems(path := destination / _PROBLEMS, problems)
    plans.check_broken(f"{len(problems)} of {total} rows", len(problems), total, plan.max_broken, path)
    return names, len(problems)


def _close(destination: Path, plan: ShufflePlan) -> None:
    """Write the indexes of the splits after all files are finished."""
    directory = plans.state(destination)
    for split in reversed(SPLITS):  # train.json comes last, to mark the data set as complete
        written = []
        for name in (file for file in plan.names if file.startswith(split)):
            about = plans.record_of(destination, name)
            written.append(Written(TableFile(**about["file"]), np.load(directory / f"{name}.offsets.npy")))
        if not sum(part.file.rows for part in written):
            for part in written:
                (destination / part.file.name).unlink()
                say(f"warning: {split} got no rows by chance. There are too few rows for this --validation.")
            continue
        fields, size = plan.files[0].fields, sum(one.file.size for one in written)
        table = write_index(destination, split, plan.format, fields, plan.table_size, written)
        say(f"{split}: {amount(len(table), 'row')} in {amount(len(written), 'file')}, {decimal(size)}")
        if (label := table.only_label()) is not None:
            say(f"warning: {split}: all labels are {label:g}, but AUC needs both 0 and 1")
