"""``ringdance data prepare criteo``: find the files, shuffle in two passes, close with an index."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from ringdance.data.files import needed, write_whole
from ringdance.data.order import block
from ringdance.data.prepare.chunks import SourceFile
from ringdance.data.prepare.generate import SPLITS, clear, file_count
from ringdance.data.prepare.plan import finished, state
from ringdance.data.prepare.prepare import locked, run_work, say
from ringdance.data.prepare.progress import PrepareProgress
from ringdance.data.prepare.shuffle import OutputFile, ShufflePlan, divide, read_outputs, work
from ringdance.data.tables.formats import SUFFIXES
from ringdance.data.tables.writing import ENDS, write_index
from ringdance.errors import ArgumentError
from ringdance.launch.spec import JobSpec

_OPTIONS = ("format", "shards", "table_size", "balance", "validation")
_PROBLEMS = "problems.tsv"


def find(paths: Sequence[Path], validation: Path | None) -> list[SourceFile]:
    """Find the files of click logs in directories or among files.

    A directory that Ringdance has prepared gives its train, and its validation for the other group.

    Raises:
        ArgumentError: there are none, or they do not fit each other.
    """
    found = [(one, 0) for path in paths for one in _files(path, "train")]
    if validation is None and len(paths) == 1 and (paths[0] / "validation.json").exists():
        validation = paths[0]
    if validation is not None:
        found += [(one, 1) for one in _files(validation, "validation")]
    files = [SourceFile.of(*one) for one in found]
    if len(kinds := {one.fields for one in files}) > 1:
        raise ArgumentError(f"the files have different numbers of fields: {sorted(kinds)}")
    return files


def _files(path: Path, split: str) -> list[Path]:
    if not path.exists():
        raise ArgumentError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    if (path / f"{split}.json").exists():
        names = [one["name"] for one in json.loads((path / f"{split}.json").read_text())["files"]]
        return [path / name for name in names]
    found = [
        one for one in path.iterdir()
        if one.is_file() and not one.name.startswith((".", "test"))
        and (one.with_suffix("") if one.suffix == ".gz" else one).suffix in ("", ".txt", *SUFFIXES)
        and not re.match(r"(?i)readme|license", one.name)
    ]  # fmt: skip
    if not found:
        raise ArgumentError(f"{path}: no click logs (day_0, train.txt, *.tsv, *.csv, *.libsvm, *.tfrecord)")
    return sorted(found, key=lambda one: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", one.name)])


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
        needed(module, "ctr")
    state(destination).mkdir(parents=True, exist_ok=True)
    with locked(destination):
        former = ShufflePlan.read(destination)
        if overwrite or (former is None and not (destination / "train.json").exists()):
            clear(destination, overwrite)
            _remove_state(destination)
        elif former is None or replace(former, max_broken=plan.max_broken) != plan:
            raise ArgumentError(
                f"{destination} has a data set that was begun otherwise{_differences(plan, former)}. Use the "
                "same options and files to resume, another DST, or --overwrite to begin anew"
            )
        if (destination / "train.json").exists():
            say("complete since an earlier run; --overwrite writes it again")
            return 0
        write_whole(state(destination) / "criteo.json", json.dumps(asdict(plan)).encode())
        size = sum(one.size for one in plan.files)
        say(f"{len(plan.files)} files, {decimal(size)}; {decimal(shutil.disk_usage(destination).free)} free")
        say("Pass 1 of 2: parse and sort")
        run_work(destination, work, "1", job, PrepareProgress(0, size, "rows"))
        outputs, left_out = _divide(destination, plan)
        rows = sum(one.rows for one in outputs if not finished(destination, one.name))
        say(f"Pass 2 of 2: write {rows} rows into {len(outputs)} files")
        run_work(destination, work, "2", job, PrepareProgress(rows, rows, "rows"))
        for split in reversed(SPLITS):  # train.json last: with it, all is there
            if files := [one.written(destination) for one in outputs if one.name.startswith(split)]:
                fields, size = plan.files[0].fields, sum(one.file.size for one in files)
                table = write_index(destination, split, plan.format, fields, plan.table_size, files)
                say(f"{split}: {len(table)} rows in {len(files)} files, {decimal(size)}")
        _remove_state(destination, keep="criteo.json")
        return left_out


def _differences(plan: ShufflePlan, former: ShufflePlan | None) -> str:
    if former is None:
        return ", not by this command"
    found = [
        f"--{name.replace('_', '-')} {getattr(plan, name)} instead of {getattr(former, name)}"
        for name in _OPTIONS if getattr(plan, name) != getattr(former, name)
    ]  # fmt: skip
    return f". Now: {'; '.join(found) or 'other files, or changed ones'}"


def _remove_state(destination: Path, keep: str = "") -> None:
    for path in state(destination).iterdir():
        if path.is_file() and path.name not in (keep, "lock"):
            path.unlink()


def _divide(destination: Path, plan: ShufflePlan) -> tuple[list[OutputFile], int]:
    """Decide which file gets which rows, list the broken ones; return the files and the number of broken."""
    directory = state(destination)
    runs: list[list[dict[str, Any]]] = [[], []]
    problems, total = [], 0
    for number, file in enumerate(plan.files):
        first = 1 + bool(file.header)
        notes = (json.loads((directory / note).read_text()) for n, _, note in plan.units() if n == number)
        for run in (run for note in notes for run in note):
            problems += [f"{file.path}\t{first + row}\t{text}\n" for row, text in run["broken"]]
            first, total = first + run["rows"], total + run["rows"]
            runs[file.group].append(run)
    (destination / _PROBLEMS).unlink(missing_ok=True)
    if problems:
        (destination / _PROBLEMS).write_text("".join(problems), errors="surrogateescape")
        limit = max(1, total // 100) if plan.max_broken is None else plan.max_broken
        told = f"{len(problems)} of {total} rows are broken, listed in {destination / _PROBLEMS}"
        if len(problems) > limit:
            raise ArgumentError(f"{told}: more than --max-broken {limit}. A larger one resumes from here")
        say(f"{told}, and left out. The first: {problems[0].strip()}")
    outputs = []
    for group, some in enumerate(runs):
        outputs += _outputs(directory, plan, some, group) if some else []
    write_whole(directory / "outputs.json", json.dumps([asdict(one) for one in outputs]).encode())
    return read_outputs(destination), len(problems)


def _outputs(directory: Path, plan: ShufflePlan, runs: list[dict[str, Any]], group: int) -> list[OutputFile]:
    """Divide the rows of a group into files."""
    classes = np.array([run["classes"] for run in runs])  # rows of each run and class
    total = classes.sum(axis=0)
    held = np.round(total * plan.validation).astype(int) if plan.validation else total * group
    names, counts = [], []
    for split, wanted in (("validation", held), ("train", total - held)):
        share = 1 if split == "train" else 1 / 8 if group else plan.validation
        shards = file_count(int(wanted.sum()), plan.shards * share)
        for shard in range(shards):
            names.append(f"{split}-{shard:05}-of-{shards:05}.{ENDS[plan.format]}")
            counts.append([np.subtract(*block(int(n), shard, shards)[::-1]) for n in wanted])
    cuts = []
    for number, begins in enumerate((0 * classes[:, 0], classes[:, 0])):
        keys = []
        for run, begin, end in zip(runs, begins, begins + classes[:, number], strict=True):
            keys.append(np.load(directory / f"{run['name']}.keys.npy", mmap_mode="r")[begin:end])
        ends = np.append(0, np.cumsum([one[number] for one in counts]))
        cuts.append(divide(keys, ends) + begins)
    return [
        OutputFile(name, int(np.sum(counts[n])), [
            (run["name"], [(int(cut[n, r]), int(cut[n + 1, r])) for cut in cuts])
            for r, run in enumerate(runs)
        ])
        for n, name in enumerate(names)
    ]  # fmt: skip
