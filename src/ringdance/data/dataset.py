"""A prepared data set: files that hold many images each, and an index that locates each image.

The split ``train`` consists of TFRecord or tar files, ``train.json``, which describes them, and
``train.npy``, which has one row of dtype ``ROW`` per sample, in the order of the files. A row contains the
location of the encoded image, so in both formats, a single ``pread`` reads a sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.index import IMAGES, read_array, read_json, write_index
from ringdance.data.open_files import Files, OpenFiles
from ringdance.errors import ArgumentError

ROW = np.dtype([("file", "<u4"), ("length", "<u4"), ("offset", "<u8"), ("label", "<i4")])
"""File number, size of the encoded image in bytes, its offset in the file, and its label, from 0."""

Rows = np.ndarray[Any, np.dtype[np.void]]


def joined(files: Iterable[Rows]) -> Rows:
    """Join the index rows of all files, and set the file number in each row."""
    parts = [np.zeros(0, ROW), *files]
    for number, rows in enumerate(parts[1:]):
        rows["file"] = number
    return np.concatenate(parts)


@dataclass(frozen=True)
class ShardFile:
    """One file of a split.

    Attributes:
        name: Path relative to the data set's directory.
        samples: Number of samples in the file.
        size: Size in bytes.
        crc32c: CRC-32C of the whole file.
    """

    name: str
    samples: int
    size: int
    crc32c: int


@dataclass(frozen=True)
class Dataset(Files):
    """One split of a data set on disk. Use ``open`` to create it from its index.

    Attributes:
        path: Directory of the data set.
        split: Name of the split, such as "train".
        format: "tfrecord" or "webdataset".
        classes: Directory name of each class, such as "n01440764", by label.
        files: The files, in the order of the rows.
        rows: Shape (samples,), dtype ``ROW``, memory-mapped.
    """

    path: Path
    split: str
    format: str
    classes: Sequence[str]
    files: Sequence[ShardFile]
    rows: Rows

    @classmethod
    def open(cls, path: str | os.PathLike[str], split: str = "train") -> Dataset:
        """Open a split by reading its index.

        Raises:
            ArgumentError: The index does not exist or is damaged.
        """
        index = Path(path) / f"{split}.json"
        about = read_json(index, IMAGES)
        files = [ShardFile(**file) for file in about["files"]]
        rows: Rows = read_array(index.with_suffix(".npy"), about)
        return cls(index.parent, split, about["format"], about["classes"], files, rows)

    def write(self) -> None:
        """Write the index. A process that opens it concurrently finds the old index or none."""
        about: dict[str, Any] = {"kind": IMAGES, "format": self.format, "classes": list(self.classes)}
        about["files"] = [asdict(file) for file in self.files]
        write_index(self.path / f"{self.split}.json", about, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, number: int) -> bytes:
        """Return a sample's encoded image, as stored in the file. Thread-safe.

        Raises:
            ArgumentError: The file is missing, or is shorter than its index says.
        """
        row = self.rows[number]
        file = self._open(int(row["file"]))
        data = os.pread(file.number, int(row["length"]), int(row["offset"]))
        if len(data) != row["length"]:
            name = self.path / self.files[int(row["file"])].name
            raise ArgumentError(
                f"{name} is shorter than its index says. Check all files with `ringdance data verify "
                f"{self.path}`."
            )
        return data

    def will_need(self, first: int, stop: int) -> None:
        """Read consecutive samples into the page cache. Thread-safe.

        Uses ``pread``, because with ``posix_fadvise``, Linux may read only the first 128 KiB or so.
        """
        rows = self.rows[first:stop]
        for number in np.unique(rows["file"]).tolist():
            in_file = rows[rows["file"] == number]
            begin, end = int(in_file["offset"].min()), int((in_file["offset"] + in_file["length"]).max())
            file = self._open(number)  # keep a reference, because the cache may drop the file
            os.pread(file.number, end - begin, begin)

    @cached_property
    def _open(self) -> OpenFiles[_Descriptor]:
        return OpenFiles(
            lambda number: self.path / self.files[number].name,
            lambda number, name: _Descriptor(os.open(name, os.O_RDONLY | os.O_CLOEXEC)), len(self.files),
        )  # fmt: skip

    def close(self) -> None:
        """Close all files. They are opened again when samples are read."""
        self._open.clear()


class _Descriptor:
    """An open file descriptor that is closed when the last reference to this object is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)
