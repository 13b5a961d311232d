"""``ringdance data verify`` and ``ringdance data info``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ringdance.data import tfrecord
from ringdance.data.dataset import Dataset
from ringdance.data.files import file_crc32c, needed
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.errors import ArgumentError
from ringdance.launch.system.linux import usable_cores

_LOOKED_AT = 1000
"""Images whose sizes `info` reads."""


def verify(directory: Path, decode: bool) -> int:
    """Check all files of a data set, print what is wrong; return the exit code."""
    wrong = 0
    for data in _splits(directory):
        with ThreadPoolExecutor(usable_cores()) as pool:
            problems = pool.map(partial(_problems, data, decode), range(len(data.files)))
            for problem in (text for found in problems for text in found):
                wrong += 1
                print(problem)
        size = sum(file.size for file in data.files)
        checked = "checksums and images" if decode else "checksums"
        print(f"{data.split}: {checked} of {len(data)} samples in {len(data.files)} files, {decimal(size)}")
        data.close()
    print(f"{wrong} problems" if wrong else "all is well")
    if wrong:
        hint = "Copy damaged files again, or run `ringdance data prepare` with --overwrite."
        print(hint, file=sys.stderr)
    return int(bool(wrong))


def _splits(directory: Path) -> Iterator[Dataset]:
    """Open all splits of a data set."""
    names = sorted(path.stem for path in directory.glob("*.npy") if path.with_suffix(".json").exists())
    if not names:
        Dataset.open(directory)  # explains what is missing
    yield from (Dataset.open(directory, name) for name in names)


def _problems(data: Dataset, decode: bool, number: int) -> list[str]:
    """Return what is wrong with a file."""
    file = data.files[number]
    path, found = data.path / file.name, []
    try:
        size = path.stat().st_size
        if size != file.size:
            return [f"{path}: {size} bytes instead of {file.size}"]
        if (crc := file_crc32c(path)) != file.crc32c:
            found.append(f"{path}: checksum {crc:08x} instead of {file.crc32c:08x}")
        if data.format == "tfrecord":
            with open(path, "rb") as stream:
                if (records := sum(1 for _ in tfrecord.records(stream))) != file.samples:
                    found.append(f"{path}: {records} records instead of {file.samples}")
    except (OSError, ArgumentError) as error:
        return [*found, str(error)]
    for row in np.flatnonzero(data.rows["file"] == number) if decode else ():
        try:
            clean(data.read(int(row)))
        except BrokenImage as error:
            found.append(f"{path}: sample {row} of {data.split}: {error}")
    return found


def info(directory: Path, style: str) -> int:
    """Print a table of a data set's splits, or JSON; return the exit code."""
    rows = [_about(data) for data in _splits(directory)]
    if style == "json":
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("split", "format", box=None)
    for heading in ("samples", "classes", "files", "bytes", "an image", "width", "height"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["split"], row["format"], str(row["samples"]), str(row["classes"]), str(row["files"]),
            decimal(row["bytes"]), decimal(row["bytes_per_image"]), _range(row["width"]),
            _range(row["height"]),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


def _range(values: list[int]) -> str:
    low, middle, high = values
    return str(low) if low == high else f"{low}-{high} ({middle})"


def _about(data: Dataset) -> dict[str, Any]:
    """Describe a split; widths and heights are minimum, maximum and median of some images."""
    sizes = []
    for number in np.linspace(0, len(data) - 1, min(_LOOKED_AT, len(data))).astype(int):
        try:
            sizes.append(needed("simplejpeg").decode_jpeg_header(data.read(int(number)))[:2])
        except ValueError:  # of others, in another format
            continue
    height, width = np.array(sizes or [(0, 0)]).T
    return {
        "split": data.split,
        "format": data.format,
        "samples": len(data),
        "classes": len(data.classes),
        "files": len(data.files),
        "bytes": sum(file.size for file in data.files),
        "bytes_per_image": int(data.rows["length"].mean()) if len(data) else 0,
        "width": [int(one) for one in (width.min(), np.median(width), width.max())],
        "height": [int(one) for one in (height.min(), np.median(height), height.max())],
    }
