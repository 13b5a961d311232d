"""``ringdance data verify`` and ``ringdance data info``: check and describe data sets."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from ringdance.data.dataset import Dataset
from ringdance.data.files import file_crc32c
from ringdance.data.index import TABLE, is_index, read_json
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.data.prepare.progress import amount
from ringdance.data.tables.table import Table
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores

_ROWS = 1 << 14  # number of rows to parse in one call


def verify(directory: Path, decode: bool) -> int:
    """Check all files of a data set, and print the problems. Returns the exit code."""
    wrong = 0
    for data in _splits(directory):
        if isinstance(data, ArgumentError):
            wrong += 1
            print(data)
            continue
        with ThreadPoolExecutor(usable_cores()) as pool:
            problems = pool.map(partial(_problems, data, decode), range(len(data.files)))
            for problem in (text for texts in problems for text in texts):
                wrong += 1
                print(problem)
        size = sum(file.size for file in data.files)
        kind, unit = ("rows", "row") if isinstance(data, Table) else ("images", "sample")
        checked = f"checksums and {kind}" if decode else "checksums"
        where = f"{amount(len(data), unit)} in {amount(len(data.files), 'file')}"
        print(f"{data.split}: checked {where}, {decimal(size)} ({checked})")
        if isinstance(data, Dataset):
            data.close()
    print(amount(wrong, "problem") if wrong else "no problems found")
    if wrong:
        hint = "Copy damaged files again, or run `ringdance data prepare` with --overwrite."
        print(hint, file=sys.stderr)
    return int(bool(wrong))


def _splits(directory: Path) -> Iterator[Dataset | Table | ArgumentError]:
    """Open all splits of a data set. For a damaged split, yield the error."""
    names = {path.stem for path in directory.glob("*.json") if is_index(path)}
    others = [*directory.glob("*.npy"), *directory.glob(".prepare/*.json")]  # if an index is missing
    begun = {re.sub(r"-\d+-of-\d+$", "", path.stem) for path in others} - names
    names |= {name for name in begun if any(directory.glob(f"{name}-*-of-*"))}
    if not names:
        Dataset.open(directory)  # raises an error that says why there are no splits
    for name in sorted(names):
        try:
            is_table = read_json(directory / f"{name}.json").get("kind") == TABLE
            yield Table.open(directory, name) if is_table else Dataset.open(directory, name)
        except ArgumentError as error:
            yield error


def _problems(data: Dataset | Table, decode: bool, number: int) -> list[str]:
    """Return the problems found in one file. If ``decode`` is true, also check its images or rows."""
    file = data.files[number]
    path, problems = data.path / file.name, []
    try:
        size = path.stat().st_size
        if size != file.size:
            return [f"{path}: {size} bytes instead of {file.size}"]
        if file.crc32c is not None and (crc := file_crc32c(path)) != file.crc32c:
            problems.append(f"{path}: checksum {crc:08x} instead of {file.crc32c:08x}")
        if isinstance(data, Table):
            first = sum(previous.rows for previous in data.files[:number])
            for at in range(first, first + data.files[number].rows, _ROWS) if decode else ():
                data.read(np.arange(at, min(at + _ROWS, first + data.files[number].rows)))
    except (OSError, ArgumentError) as error:
        return [*problems, str(error)]
    if decode and isinstance(data, Dataset):
        first = sum(previous.samples for previous in data.files[:number])
        for row in range(first, first + data.files[number].samples):
            try:
                clean(data.read(row))
            except (BrokenImage, ArgumentError) as error:
                problems.append(f"{path}: sample {row} of {data.split}: {error}")
    return problems


def info(directory: Path) -> int:
    """Print one line about each split of a data set. Returns the exit code."""
    for data in _splits(directory):
        if isinstance(data, ArgumentError):
            raise data
        size = sum(file.size for file in data.files)
        if isinstance(data, Table):
            rows = f"{amount(len(data), 'row')} of {amount(data.fields, 'field')}"
            what = f"{rows}, ids below {data.table_size}"
        else:
            what = f"{amount(len(data), 'sample')} of {amount(len(data.classes), 'class', 'classes')}"
        each = decimal(size // max(len(data), 1))
        files = f"{amount(len(data.files), 'file')} ({data.format}), {decimal(size)}, {each} each"
        print(f"{data.split}: {what}, in {files}")
    return 0
