"""``ringdance data prepare criteo``: find the files, shuffle in two passes, close with an index."""

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
from ringdance.data.prepare.chunks import PARQUET, SourceFile, plain
from ringdance.data.prepare.plan import (
    check_broken,
    differences,
    finished,
    list_problems,
    listed,
    locked,
    state,
)
from ringdance.data.prepare.prepare import check_sizes
from ringdance.data.prepare.progress import PrepareProgress, counted, say
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
"""Bytes that are parsed at once: so many for each so many bytes of the source, which bounds the runs."""
_TRIED, _BEGINNING = 16, 1 << 22
"""Files, and bytes of each, whose rows are counted for the estimate of the size."""


def find(paths: Sequence[Path], validation: Path | None) -> list[SourceFile]:
    """Find the files of click logs in directories or among files.

    A directory that Ringdance has prepared gives its train, and its validation for the other group.

    Raises:
        ArgumentError: there are none, or they do not fit each other.
    """
    found = [(*one, 0) for path in paths for one in _files(path, "train")]
    if validation is None and len(paths) == 1 and (paths[0] / "validation.json").exists():
        validation = paths[0]
    if validation is not None:
        found += [(*one, 1) for one in _files(validation, "validation")]
    seen: dict[Path, Path] = {}
    for path, *_ in found:
        names = {plain(path), plain(path.resolve())}
        if other := next((seen[one] for one in names if one in seen), None):
            raise ArgumentError(f"{path} has the rows of {other}, which would be taken twice: leave out one")
        seen |= dict.fromkeys(names, path)
    files = [SourceFile.of(path, group, crc32c) for path, crc32c, group in found]
    if len(kinds := {one.fields for one in files}) > 1:
        raise ArgumentError(f"the files have different numbers of fields: {sorted(kinds)}")
    return files


def _files(path: Path, split: str) -> list[tuple[Path, int | None]]:
    """List files of click logs, with their checksums if an index has them."""
    if not path.exists():
        raise ArgumentError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [(path, None)]
    if (path / f"{split}.json").exists():
        table = Table.open(path, split)
        check_sizes(path, table.files)
        return [(path / one.name, one.crc32c) for one in table.files if one.rows]
    found = [
        one for one in path.iterdir()
        if not one.is_dir() and not re.match(r"(?i)\.|test|readme|license", one.name)
        and plain(one).suffix.lower() in ("", ".txt", PARQUET, *SUFFIXES)
    ]  # fmt: skip
    if others := sorted(one.name for one in path.iterdir() if one not in found):
        say(f"not read, by their names: {counted(others)}")
    empty = {one for one in found if one.is_file() and not one.stat().st_size}  # as of Spark: _SUCCESS, parts
    if empty and len(empty) < len(found):
        say(f"left out, as they are empty: {', '.join(sorted(one.name for one in empty))}")
        found = [one for one in found if one not in empty]
    if not found:
        raise ArgumentError(f"{path}: no click logs (day_0, .txt, .tsv, .csv, .parquet, .libsvm, .tfrecord)")
    found.sort(key=lambda one: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", one.name)])
    return [(one, None) for one in found]


def prepare(destination: Path, files: Sequence[SourceFile], given: argparse.Namespace) -> int:
    """Write a data set, or what is left of it; return how many broken rows were left out.

    Args:
        destination: directory; made if it is missing.
        files: of the source, see :func:`find`.
        given: options of the command.

    Raises:
        ArgumentError: it cannot be done so, with the remedy.
    """
    for module in ("google_crc32c", "pyarrow"):
        needed(module)
    for file in files:
        if Path(file.path).resolve().is_relative_to(destination.resolve()):
            raise ArgumentError(f"{file.path} is within DST, where files are replaced: choose another DST")
    state(destination).mkdir(parents=True, exist_ok=True)
    plan = _plan(files, given)
    with locked(destination):
        _begin_or_resume(destination, plan, given.overwrite)
        if (destination / "train.json").exists():
            for split in SPLITS:
                if (destination / f"{split}.json").exists():
                    check_sizes(destination, Table.open(destination, split).files)
            say("complete since an earlier run; --overwrite writes it again")
            return listed(destination / _PROBLEMS, b"\n")
        write_whole(state(destination) / "criteo.json", json.dumps(asdict(plan)).encode())
        say(f"Pass 1 of 2: parse and sort {len(files)} files")
        units = [one for one in plan.units() if not is_scattered(destination, one[2])]
        progress = PrepareProgress(sum(one.size for one in files), "rows")
        run_tasks(scatter, [(destination, *one) for one in units], given.num_proc, progress)
        runs, left_out = _runs(destination, plan)
        if not runs:
            raise ArgumentError(f"{files[0].path} has no rows, nor has another file of SRC")
        counts = write_cuts(destination, runs).tolist()
        left = [n for n, name in enumerate(plan.names) if not finished(destination, name)]
        rows = sum(counts[number] for number in left)
        say(f"Pass 2 of 2: write {rows} rows into {len(left)} files")
        tasks = [(destination, number) for number in left]
        run_tasks(gather, tasks, given.num_proc, PrepareProgress(rows, "rows"))
        _close(destination, plan)
        _remove_state(destination, keep="criteo.json")
        return left_out


def _plan(files: Sequence[SourceFile], given: argparse.Namespace) -> ShufflePlan:
    """Return what is to be done, with the number of files by the beginnings of the source."""
    share = 0.0 if isinstance(given.validation, Path) else given.validation
    each = _rows_in_a_byte(files, given.table_size)
    own, other = (each * sum(one.size for one in files if one.group == group) for group in (1, 0))
    held, kept, row = own + other * share, other * (1 - share), dtype(files[0].fields).itemsize
    wanted = given.shards or max(1, round(kept * row / _FILE_SIZE))
    counts = {"validation": round(wanted * held / max(kept, 1)) or int(held > 0), "train": wanted}
    names = [
        f"{split}-{shard:05}-of-{count:05}.{ENDS[given.format]}"
        for split, count in counts.items() for shard in range(count)
    ]  # fmt: skip
    chunk = round(given.chunk * (1 << 20)) or _CHUNK * (1 + sum(one.size for one in files) // _LARGE)
    return ShufflePlan(
        files, names, counts["validation"], given.format, given.table_size, share, given.max_broken, chunk
    )


def _rows_in_a_byte(files: Sequence[SourceFile], table_size: int) -> float:
    """Estimate it by the beginnings of some files."""
    rows = looked_at = 0.0
    for number in np.linspace(0, len(files) - 1, min(_TRIED, len(files))).astype(int):
        file = replace(files[number], crc32c=None)
        for _, data, size in islice(file.read(file.units(_BEGINNING)[0], _BEGINNING), 1):
            count = formats.parse(file.format, data, files[0].fields, table_size)[0]
            rows += count * file.size / size
            looked_at += file.size
    return rows / max(looked_at, 1)


def _begin_or_resume(destination: Path, plan: ShufflePlan, overwrite: bool) -> None:
    """Remove what is to be overwritten.

    Raises:
        ArgumentError: There is something else than a part of the same work.
    """
    former = None
    with suppress(ArgumentError) if overwrite else nullcontext():  # a damaged plan
        former = ShufflePlan.read(destination)
    if not overwrite and former and replace(former, max_broken=plan.max_broken) == plan:
        return
    indexes = [path for split in SPLITS if (path := destination / f"{split}.json").exists()]
    if not overwrite and (former or indexes):
        raise ArgumentError(
            f"{destination} has a data set that was begun otherwise. Now: {_differences(plan, former)}. Use "
            "the same options and files to resume, another DST, or --overwrite to begin anew"
        )
    own = set(former.names if former else ())
    if (state(destination) / "criteo.json").exists():  # not the images of another preparation
        own |= {path.name.removesuffix(".json") for path in state(destination).glob("*-of-*.json")}
    for path in indexes:
        with suppress(ArgumentError):  # a damaged one
            own |= {one.name for one in Table.open(destination, path.stem).files}
    found = {path.name for split in SPLITS for path in destination.glob(f"{split}-*-of-*.*")}
    if others := sorted(found - own):
        raise ArgumentError(
            f"{destination} has {others[0]} ({len(others)} such files), which no index or unfinished run of "
            "this command names: choose another DST, or move or delete them"
        )
    for name in (*found, *(f"{split}.{end}" for split in SPLITS for end in ("json", "npy"))):
        (destination / name).unlink(missing_ok=True)
    _remove_state(destination)


def _differences(plan: ShufflePlan, former: ShufflePlan | None) -> str:
    found = differences(plan, former, "format", "table_size", "validation") if former else []
    if former and len(plan.names) != len(former.names):
        found.append(f"{len(plan.names)} instead of {len(former.names)} files (--shards)")
    return "; ".join(found) or "other files, or changed ones"


def _remove_state(destination: Path, keep: str = "") -> None:
    for path in state(destination).iterdir():
        if path.is_file() and path.name not in (keep, "lock"):
            path.unlink()


def _runs(destination: Path, plan: ShufflePlan) -> tuple[list[str], int]:
    """List the broken rows; return the names of the runs, and the number of broken rows."""
    names, problems, total = list[str](), list[tuple[str, ...]](), 0
    for number, units in groupby(plan.units(), lambda unit: unit[0]):
        file = plan.files[number]
        first = 1 + (file.header > len(BOM))
        notes = (json.loads((state(destination) / note).read_text()) for _, _, note in units)
        for run in (run for note in notes for run in note):
            problems += [(file.path, str(first + row), text) for row, text in run["broken"]]
            first, total = first + run["rows"], total + run["rows"]
            names.append(run["name"])
    list_problems(path := destination / _PROBLEMS, problems)
    check_broken(f"{len(problems)} of {total} rows", len(problems), total, plan.max_broken, path)
    return names, len(problems)


def _close(destination: Path, plan: ShufflePlan) -> None:
    """Write the indexes of the finished files."""
    directory = state(destination)
    for split in reversed(SPLITS):  # train.json last: with it, all is there
        written = []
        for name in (one for one in plan.names if one.startswith(split)):
            if (about := finished(destination, name)) is None:
                raise ArgumentError(f"{name} disappeared from {destination}")
            written.append(Written(TableFile(**about["file"]), np.load(directory / f"{name}.offsets.npy")))
        if not sum(one.file.rows for one in written):
            for one in written:
                (destination / one.file.name).unlink()
                say(f"warning: {split} got no rows by chance: there are too few for this --validation")
            continue
        fields, size = plan.files[0].fields, sum(one.file.size for one in written)
        table = write_index(destination, split, plan.format, fields, plan.table_size, written)
        say(f"{split}: {len(table)} rows in {len(written)} files, {decimal(size)}")
        if (label := table.only_label()) is not None:
            say(f"warning: {split}: all labels are {label:g}: AUC needs rows of both kinds")
