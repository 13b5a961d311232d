"""``ringdance data prepare criteo``: find the files, shuffle in two passes, close with an index."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from ringdance.data.files import needed, npy, write_whole
from ringdance.data.order import block
from ringdance.data.prepare import shuffle
from ringdance.data.prepare.chunks import PARQUET, SourceFile, plain
from ringdance.data.prepare.generate import OUTPUTS, SPLITS, clear, file_count
from ringdance.data.prepare.plan import finished, state
from ringdance.data.prepare.prepare import check_sizes, listed, locked, run_work
from ringdance.data.prepare.progress import PrepareProgress, counted, say
from ringdance.data.prepare.shuffle import OutputFile, Run, ShufflePlan, cuts, is_merged, work
from ringdance.data.tables import formats
from ringdance.data.tables.criteo import BOM
from ringdance.data.tables.formats import SUFFIXES
from ringdance.data.tables.rows import dtype
from ringdance.data.tables.table import Table
from ringdance.data.tables.writing import ENDS, write_index
from ringdance.errors import ArgumentError
from ringdance.launch.spec import JobSpec

_OPTIONS = ("format", "shards", "table_size", "balance", "validation")
_PROBLEMS = "problems.tsv"
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


def prepare(destination: Path, plan: ShufflePlan, job: JobSpec, overwrite: bool) -> int:
    """Write a data set, or what is left of it; return how many broken rows were left out.

    Args:
        destination: directory; made if it is missing.
        plan: what to do.
        job: the processes that write; its command is set here.
        overwrite: whether to begin anew.

    Raises:
        ArgumentError: it cannot be done so, with the remedy.
        LaunchError: a process failed.
    """
    for module in ("google_crc32c", "pyarrow"):
        needed(module)
    for file in plan.files:
        if Path(file.path).resolve().is_relative_to(destination.resolve()):
            raise ArgumentError(f"{file.path} is within DST, where files are replaced: choose another DST")
    state(destination).mkdir(parents=True, exist_ok=True)
    with locked(destination):
        former = None if overwrite else ShufflePlan.read(destination)
        if overwrite or (former is None and not (destination / "train.json").exists()):
            clear(destination, overwrite)
            _remove_state(destination)
        elif former is None or replace(former, max_broken=plan.max_broken) != plan:
            raise ArgumentError(
                f"{destination} has a data set that was begun otherwise{_differences(plan, former)}. Use the "
                "same options and files to resume, another DST, or --overwrite to begin anew"
            )
        if (destination / "train.json").exists():
            for split in SPLITS:
                if (destination / f"{split}.json").exists():
                    check_sizes(destination, Table.open(destination, split).files)
            say("complete since an earlier run; --overwrite writes it again")
            return listed(destination / _PROBLEMS, b"\n")
        size = _check_space(destination, plan)
        write_whole(state(destination) / "criteo.json", json.dumps(asdict(plan)).encode())
        say("Pass 1 of 2: parse and sort")
        run_work(destination, work, "1", job, PrepareProgress(0, size, "rows"))
        groups, left_out = _runs(destination, plan)
        outputs = []
        for group, runs in enumerate(_merged(destination, groups, job)):
            outputs += _outputs(destination, plan, runs, group)
        about = json.dumps([asdict(one) for one in outputs])
        write_whole(state(destination) / OUTPUTS, about.encode())
        rows = sum(one.rows for one in outputs if not finished(destination, one.name))
        say(f"Pass 2 of 2: write {rows} rows into {len(outputs)} files")
        run_work(destination, work, "2", job, PrepareProgress(rows, rows, "rows"))
        for split in reversed(SPLITS):  # train.json last: with it, all is there
            if files := [one.written(destination) for one in outputs if one.name.startswith(split)]:
                fields, size = plan.files[0].fields, sum(one.file.size for one in files)
                table = write_index(destination, split, plan.format, fields, plan.table_size, files)
                say(f"{split}: {len(table)} rows in {len(files)} files, {decimal(size)}")
                if (label := table.only_label()) is not None:
                    say(f"warning: {split}: all labels are {label:g}: AUC needs rows of both kinds")
        _remove_state(destination, keep=("criteo.json", OUTPUTS))
        return left_out


def _check_space(destination: Path, plan: ShufflePlan) -> int:
    """Estimate the bytes of what is sorted and of the result, by the beginnings of some files.

    Returns:
        Bytes of all files.

    Raises:
        ArgumentError: they do not fit on the disk.
    """
    rows, looked_at, fields = 0.0, 0, plan.files[0].fields
    for number in np.linspace(0, len(plan.files) - 1, min(_TRIED, len(plan.files))).astype(int):
        file = replace(plan.files[number], crc32c=None)
        first = next(file.read(file.units(_BEGINNING)[0], _BEGINNING), None)
        if first is None:  # an array of no rows
            continue
        _, data, size = first
        rows += formats.parse(file.format, data, fields, plan.table_size)[0] * file.size / size
        looked_at += file.size
    size = sum(one.size for one in plan.files)
    row = 8 + 2 * dtype(fields).itemsize  # its key; sorted and in the result, which other formats have alike
    there = [*state(destination).iterdir(), *destination.glob("*-*-of-*")]
    done = sum(path.stat().st_size for path in there)
    left = max(0, round(rows * size / max(1, looked_at) * row) - done)
    free = shutil.disk_usage(destination).free
    say(f"{len(plan.files)} files, {decimal(size)}; about {decimal(left)} to write, {decimal(free)} free")
    if left > free:
        raise ArgumentError(
            f"{destination}: about {decimal(left)} to write, half of it for the time of sorting, but only "
            f"{decimal(free)} free. Free some space, or choose another DST"
        )
    return size


def _differences(plan: ShufflePlan, former: ShufflePlan | None) -> str:
    if former is None:
        return ", not by this command"
    found = [
        f"--{name.replace('_', '-')} {getattr(plan, name)} instead of {getattr(former, name)}"
        for name in _OPTIONS if getattr(plan, name) != getattr(former, name)
    ]  # fmt: skip
    return f". Now: {'; '.join(found) or 'other files, or changed ones'}"


def _remove_state(destination: Path, keep: Sequence[str] = ()) -> None:
    for path in state(destination).iterdir():
        if path.is_file() and path.name not in (*keep, "lock"):
            path.unlink()


def _runs(destination: Path, plan: ShufflePlan) -> tuple[list[list[Run]], int]:
    """List the broken rows; return the runs of each group, and the number of broken rows."""
    directory = state(destination)
    runs: list[list[Run]] = [[], []]
    problems, total = [], 0
    for number, units in groupby(plan.units(), lambda unit: unit[0]):
        file = plan.files[number]
        first = 1 + (file.header > len(BOM))
        notes = (json.loads((directory / note).read_text()) for _, _, note in units)
        for run in (run for note in notes for run in note):
            problems += [f"{file.path}\t{first + row}\t{text}\n" for row, text in run["broken"]]
            first, total = first + run["rows"], total + run["rows"]
            runs[file.group].append(Run(run["name"], run["classes"]))
    (destination / _PROBLEMS).unlink(missing_ok=True)
    if problems:
        (destination / _PROBLEMS).write_text("".join(problems), errors="surrogateescape")
        limit = max(1, total // 100) if plan.max_broken is None else plan.max_broken
        told = f"{len(problems)} of {total} rows are broken, listed in {destination / _PROBLEMS}"
        if len(problems) > limit:
            raise ArgumentError(f"{told}: more than --max-broken {limit}. A larger one resumes from here")
        say(f"{told}, and left out. The first: {problems[0].strip()}")
    return runs, len(problems)


def _merged(destination: Path, groups: list[list[Run]], job: JobSpec) -> list[list[Run]]:
    """Merge the runs of groups that have too many; return those that are left."""
    found, todo = [], []
    for group, runs in enumerate(groups):
        if len(runs) > shuffle.MOST_RUNS:
            begins = range(0, len(runs), shuffle.MERGED)
            parts = [(f"merged.{group}.{at}", runs[at : at + shuffle.MERGED]) for at in begins]
            todo += parts
            runs = [Run(name, np.sum([run.classes for run in some], 0).tolist()) for name, some in parts]
        found.append(runs)
    if todo:
        write_whole(state(destination) / "merge.json", json.dumps(todo).encode())
        left = [some for name, some in todo if not is_merged(destination, name)]
        rows = sum(sum(run.classes) for some in left for run in some)
        say(f"Between the passes: merge {sum(map(len, left))} runs into {len(left)}")
        run_work(destination, work, "merge", job, PrepareProgress(rows, rows, "rows"))
    return found


def _outputs(destination: Path, plan: ShufflePlan, runs: list[Run], group: int) -> list[OutputFile]:
    """Divide the rows of a group into files."""
    if not runs:
        return []
    total = np.sum([run.classes for run in runs], axis=0)  # of each class
    held = np.round(total * plan.validation).astype(int) if plan.validation else total * group
    names, counts = [], []
    for split, wanted in (("validation", held), ("train", total - held)):
        share = 1 if split == "train" else 1 / 8 if group else plan.validation
        shards = file_count(int(wanted.sum()), plan.shards * share)
        for shard in range(shards):
            names.append(f"{split}-{shard:05}-of-{shards:05}.{ENDS[plan.format]}")
            counts.append([np.subtract(*block(int(n), shard, shards)[::-1]) for n in wanted])
    ranks, directory = np.cumsum([0 * total, *counts], axis=0), state(destination)
    found = [cuts(directory, runs, kind, ranks[:, kind]) for kind in range(len(total))]
    write_whole(directory / f"cuts.{group}.npy", npy(np.stack(found, axis=1)))
    write_whole(directory / f"runs.{group}.json", json.dumps([run.name for run in runs]).encode())
    return [OutputFile(name, int(sum(counts[n])), group, n) for n, name in enumerate(names)]
