"""``ringdance data generate``: write click logs with a planted signal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from ringdance.data.files import write_whole
from ringdance.data.order import block
from ringdance.data.prepare.plan import state
from ringdance.data.prepare.progress import PrepareProgress
from ringdance.data.tables import criteo
from ringdance.data.tables.auc import auc
from ringdance.data.tables.planted import PlantedRows, planted
from ringdance.data.tables.rows import Array
from ringdance.data.tables.writing import ENDS, TableWriter, Written, write_index
from ringdance.errors import ArgumentError

SPLITS = ("train", "validation")
ABOUT = "planted.json"
"""Holds rows, share of clicks and best possible AUC of each split."""
OUTPUTS = "outputs.json"
"""In ``.prepare``, or behind the name of a split: a list of the files that are written. It stays."""
_FILE_SIZE = 256 << 20


def generate(
    destination: Path, rows: int, seed: int = 0, day: int = 0, *, table_size: int = 1_000_000,
    format: str = "rows", shards: int = 0, validation: float = 0.0, overwrite: bool = False,
) -> None:
    """Write a data set, print the AUC of the true probabilities of each split.

    Args:
        destination: directory; made if it is missing.
        rows: of all splits.
        seed: as of ``planted``.
        day: the same.
        table_size: ids are below it.
        format: "rows", "tfrecord" or "libsvm".
        shards: files of train; 0: by size. As many rows in each of validation.
        validation: share of the rows, from 0 to 1.
        overwrite: whether to remove a data set that is there.

    Raises:
        ArgumentError: there is one already, or a package is missing.
    """
    destination.mkdir(parents=True, exist_ok=True)
    clear(destination, overwrite)
    held = round(rows * validation)
    about: dict[str, object] = {"seed": seed, "day": day}
    draw = partial(planted, seed=seed, day=day)
    with PrepareProgress(rows, rows, "rows") as progress:
        for split, some in zip(SPLITS, (range(rows - held), range(rows - held, rows)), strict=True):
            if some:
                files = file_count(len(some), shards * len(some) / (rows - held))
                about[split] = _write(destination, split, some, draw, format, table_size, files, progress)
    write_whole(destination / ABOUT, json.dumps(about, indent=1).encode() + b"\n")


def file_count(rows: int, wanted: float) -> int:
    """Return the number of files of a split: `wanted`, or if that is 0, of 268 MB each."""
    return min(max(1, round(wanted or rows * (12 + 8 * criteo.FIELDS) / _FILE_SIZE)), rows)


def clear(destination: Path, overwrite: bool) -> None:
    """Remove the splits of a data set with their files: those that an index or a list of outputs names.

    Raises:
        ArgumentError: there are some, and they are not to be overwritten; or there are files of others.
    """
    indexes = [path for split in SPLITS for path in (destination / f"{split}.json",) if path.exists()]
    if indexes and not overwrite:
        raise ArgumentError(f"{destination} has a data set ({indexes[0].name}). --overwrite removes it")
    own: set[str] = set()
    for path in (lists := [*indexes, *state(destination).glob(f"*{OUTPUTS}")]):
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged one: its files are in the other
            about = json.loads(path.read_bytes())
            own |= {one["name"] for one in (about if isinstance(about, list) else about["files"])}
    found = {path.name for split in SPLITS for path in destination.glob(f"{split}-*-of-*.*")}
    if others := sorted(found - own):
        raise ArgumentError(
            f"{destination} has {others[0]} ({len(others)} such files), which no index or unfinished run of "
            "this command names: choose another DST, or move or delete them"
        )
    for path in (*lists, *(destination / name for name in (*found, ABOUT, "train.npy", "validation.npy"))):
        path.unlink(missing_ok=True)


def _write(
    destination: Path, split: str, rows: range, draw: Callable[..., Iterator[PlantedRows]], format: str,
    table_size: int, shards: int, progress: PrepareProgress,
) -> dict[str, float]:
    files: list[Written] = []
    labels: list[Array] = []
    probabilities: list[Array] = []
    paths = [destination / f"{split}-{n:05}-of-{shards:05}.{ENDS[format]}" for n in range(shards)]
    state(destination).mkdir(exist_ok=True)
    listed = json.dumps([{"name": one.name} for one in paths]).encode()
    write_whole(state(destination) / f"{split}.{OUTPUTS}", listed)
    for number, path in enumerate(paths):
        some = rows[slice(*block(len(rows), number, shards))]
        with TableWriter(path, format, len(some), criteo.FIELDS, table_size) as file:
            for part in draw(len(some), start=some.start):
                file.write(part.rows(table_size))
                labels.append(part.labels)
                probabilities.append(part.probabilities)
                progress.add(len(part.labels), len(part.labels))
        files.append(file.written)
    write_index(destination, split, format, criteo.FIELDS, table_size, files)
    clicks, size = np.concatenate(labels), sum(one.file.size for one in files)
    best = auc(np.concatenate(probabilities), clicks)
    print(
        f"{split}: {len(rows)} rows in {shards} files, {decimal(size)}; {clicks.mean():.1%} clicks; "
        f"AUC of the true probabilities {best:.5f}"
    )  # fmt: skip
    return {"rows": len(rows), "positives": float(clicks.mean()), "auc": best}
