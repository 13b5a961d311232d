"""A prepared data set: files with many images each, and an index of where each image is.

A split ``train`` in a directory consists of its files (TFRecords or tars), of ``train.json``, which describes
it, and of ``train.npy``, with a row of dtype :data:`ROW` for each sample in the order of the files. Rows hold
the place of the encoded image itself, so that reading a sample is one ``pread``, whatever the format.
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
"""Number of the file; bytes of the encoded image, and where they begin in the file; the class, from 0."""

Rows = np.ndarray[Any, np.dtype[np.void]]


def joined(files: Iterable[Rows]) -> Rows:
    """Return the rows of all files, each with the number of its file."""
    found = [np.zeros(0, ROW), *files]
    for number, rows in enumerate(found[1:]):
        rows["file"] = number
    return np.concatenate(found)


@dataclass(frozen=True)
class ShardFile:
    """One file of a split.

    Attributes:
        name: relative to the data set's directory.
        samples: how many it has.
        size: in bytes.
        crc32c: of the whole file.
    """

    name: str
    samples: int
    size: int
    crc32c: int


@dataclass(frozen=True)
class Dataset(Files):
    """One split of a data set on disk; :meth:`open` makes it from its index.

    Attributes:
        path: the directory.
        split: such as "train".
        format: "tfrecord" or "webdataset".
        classes: the directory name of each class, such as "n01440764", by label.
        files: in the order of the rows.
        rows: shape (samples,), dtype ROW; memory-mapped.
    """

    path: Path
    split: str
    format: str
    classes: Sequence[str]
    files: Sequence[ShardFile]
    rows: Rows

    @classmethod
    def open(cls, path: str | os.PathLike[str], split: str = "train") -> Dataset:
        """Open a split by its index.

        Raises:
            ArgumentError: there is no index of that name, or it is damaged.
        """
        index = Path(path) / f"{split}.json"
        about = read_json(index, IMAGES)
        files = [ShardFile(**one) for one in about["files"]]
        rows: Rows = read_array(index.with_suffix(".npy"), about)
        return cls(index.parent, split, about["format"], about["classes"], files, rows)

    def write(self) -> None:
        """Write the index; a process that opens it meanwhile finds the old one or none."""
        about: dict[str, Any] = {"kind": IMAGES, "format": self.format, "classes": list(self.classes)}
        about["files"] = [asdict(one) for one in self.files]
        write_index(self.path / f"{self.split}.json", about, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, number: int) -> bytes:
        """Return a sample's encoded image, as it is in the file. Any thread may call it.

        Raises:
            ArgumentError: the file is missing or shorter than the index says.
        """
        row = self.rows[number]
        file = self._open(int(row["file"]))
        data = os.pread(file.number, int(row["length"]), int(row["offset"]))
        if len(data) != row["length"]:
            name = self.path / self.files[int(row["file"])].name
            raise ArgumentError(f"{name} is shorter than its index says: `ringdance data verify {self.path}`")
        return data

    def will_need(self, first: int, stop: int) -> None:
        """Read samples that follow one another into the page cache. Any thread may call it.

        Not by ``posix_fadvise``: Linux reads only the first 128 KiB or so of what is advised.
        """
        rows = self.rows[first:stop]
        for number in np.unique(rows["file"]).tolist():
            some = rows[rows["file"] == number]
            begin, end = int(some["offset"].min()), int((some["offset"] + some["length"]).max())
            file = self._open(number)  # stays open as long as this refers to it
            os.pread(file.number, end - begin, begin)

    @cached_property
    def _open(self) -> OpenFiles[_Descriptor]:
        return OpenFiles(
            lambda number: self.path / self.files[number].name,
            lambda number, name: _Descriptor(os.open(name, os.O_RDONLY | os.O_CLOEXEC)), len(self.files),
        )  # fmt: skip

    def close(self) -> None:
        """Close its files; reading opens them again."""
        self._open.clear()


class _Descriptor:
    """An open file, closed with the last reference."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)
