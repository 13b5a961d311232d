"""The plan that assigns images to output files, stored on disk for the processes that write them.

For the split ``train``, ``DST/.prepare`` contains the images' locations and names (``train.places.npy`` and
``train.names``), and ``train.json`` with the options, the source, and where each file's images begin in these
lists. For each finished file, it contains its index rows, ``NAME.rows.npy``, and then ``NAME.json``, which
contains the checksum of these rows. After all files are finished, only ``train.json`` is kept, so that a
later run can compare its options.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ringdance.data.dataset import Dataset, Rows, ShardFile, joined
from ringdance.data.files import file_crc32c, npy, write_whole
from ringdance.data.prepare.progress import say
from ringdance.data.prepare.sources import Source
from ringdance.data.tables.rows import Array
from ringdance.data.tables.table import TableFile
from ringdance.data.writing import shard_name
from ringdance.errors import ArgumentError

T = TypeVar("T")
DAMAGE = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that a damaged JSON file causes when it is parsed or used."""
_SEED = 0


@dataclass(frozen=True)
class SplitPlan:
    """The plan of a split.

    Attributes:
        split: Name of the split, such as "train".
        format: "tfrecord" or "webdataset".
        shards: Number of files.
        resize: Maximum length of an image's shorter side in pixels, or 0 to keep all sizes.
        fingerprint: The source's ``fingerprint``.
        images: Number of images.
        size: Total size of the images in bytes.
        root, classes, tars, changed: Same as in ``Source``.
        first: Index of each file's first image, followed by the total number of images.
        names_at: Offset of each file's names in ``train.names``, followed by the size of ``train.names``.
    """

    split: str
    format: str
    shards: int
    resize: int
    fingerprint: str
    images: int
    size: int
    root: str
    classes: Sequence[str]
    tars: Sequence[str]
    first: Sequence[int]
    changed: str
    names_at: Sequence[int] = ()

    @classmethod
    def read(cls, destination: Path, split: str) -> SplitPlan | None:
        """Read a split's plan. Returns None if it does not exist."""
        return read_plan(state(destination) / f"{split}.json", lambda about: cls(**about))

    def name(self, shard: int) -> str:
        """Return a file's name."""
        return shard_name(self.split, shard, self.shards, self.format)

    def images_of(self, destination: Path, shard: int) -> tuple[list[str], Rows]:
        """Return the names and locations of a file's images."""
        directory = state(destination)
        begin, end = self.names_at[shard : shard + 2]
        with open(directory / f"{self.split}.names", "rb") as file:
            data = os.pread(file.fileno(), end - begin, begin)
        places = np.load(directory / f"{self.split}.places.npy", mmap_mode="r")
        names = data.decode(errors="surrogateescape").split("\n")[:-1]
        return names, places[self.first[shard] : self.first[shard + 1]]

    def differences(self, other: SplitPlan) -> list[str]:
        """Describe the differences from another plan, for error messages."""
        changes = differences(self, other, "format", "shards", "resize")
        if self.fingerprint != other.fingerprint:
            number = f"{self.images} instead of {other.images}"
            changes.append(f"other images ({number}, or other sizes, names or labels)")
        return changes

    def close(self, destination: Path, files: Sequence[ShardFile]) -> Dataset:
        """Write the index of the finished files, and remove the temporary files."""
        rows = joined(np.load(state(destination) / f"{file.name}.rows.npy") for file in files)
        Dataset(destination, self.split, self.format, self.classes, files, rows).write()
        self.remove_state(destination, keep=f"{self.split}.json")
        return Dataset.open(destination, self.split)

    def remove_state(self, destination: Path, keep: str = "") -> None:
        """Remove the split's files from ``.prepare``, except the file ``keep``."""
        remove_state(destination, keep, (f"{self.split}.", f"{self.split}-"))


def differences(plan: Any, former: Any, *options: str) -> list[str]:
    """Describe each option that differs between a plan and a former plan."""
    values = ((name, getattr(plan, name) or "none", getattr(former, name) or "none") for name in options)
    changed = (option for option in values if option[1] != option[2])
    return [f"--{name.replace('_', '-')} {now} instead of {before}" for name, now, before in changed]


def state(destination: Path) -> Path:
    """Return the directory for temporary files and records of a preparation."""
    return destination / ".prepare"


def remove_state(destination: Path, keep: str = "", prefixes: tuple[str, ...] = ("",)) -> None:
    """Remove files with one of the prefixes from ``.prepare``, except ``keep`` and the lock file."""
    for path in state(destination).iterdir():
        if path.is_file() and path.name not in (keep, "lock") and path.name.startswith(prefixes):
            path.unlink()


def read_plan(path: Path, made: Callable[[Any], T]) -> T | None:
    """Parse a JSON file and convert it to a plan with ``made``. Returns None if the file does not exist.

    Raises:
        ArgumentError: The file is damaged.
    """
    try:
        return made(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except DAMAGE:
        raise ArgumentError(f"{path} is damaged. Start again with --overwrite.") from None


def record(destination: Path, file: ShardFile | TableFile, kind: str, array: Array, **more: Any) -> None:
    """Write a record that an output file is finished.

    Args:
        destination: The data set's directory.
        file: The file's entry for the index.
        kind: What ``array`` contains, such as "rows". Used in the name of its file.
        array: The file's part of the index: rows, or offsets of blocks.
        more: Additional values for the record.
    """
    directory = state(destination)
    name = f"{file.name}.{kind}.npy"
    checksum = write_whole(directory / name, npy(array))
    about = {"file": asdict(file), "crc32c": {name: checksum}, **more}
    write_whole(directory / f"{file.name}.json", json.dumps(about).encode())


def finished(destination: Path, name: str) -> dict[str, Any] | None:
    """Return the record of a finished file, or None if the file is missing or changed."""
    directory = state(destination)
    try:
        about: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
        same = (destination / name).stat().st_size == about["file"]["size"]
        return about if same and unchanged(directory, about.get("crc32c", {})) else None
    except (FileNotFoundError, *DAMAGE):
        return None


def record_of(destination: Path, name: str) -> dict[str, Any]:
    """Return the record of a finished file. Raises ArgumentError if the file is missing or changed."""
    if (about := finished(destination, name)) is None:
        raise ArgumentError(f"{destination / name} was written, but is now missing or changed. Run again.")
    return about


def unchanged(directory: Path, checksums: Mapping[str, int]) -> bool:
    """Return True if all files match their CRC-32C checksums. ``checksums`` is keyed by file name."""
    return all(file_crc32c(directory / name) == crc for name, crc in checksums.items())


def listed(path: Path, mark: bytes) -> int:
    """Count the occurrences of ``mark`` in a problem list. Returns 0 if the file does not exist."""
    return path.read_bytes().count(mark) if path.exists() else 0


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Lock the directory if the file system supports locks, and remove files left behind by killed runs."""
    with open(state(destination) / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(
                f"another `ringdance data prepare` is writing to {destination}. Wait until it ends."
            ) from None
        except OSError:
            pass
        for path in [*destination.glob(".*-*-of-*"), *state(destination).glob(".*")]:
            path.unlink(missing_ok=True)
        yield


def list_problems(path: Path, problems: Sequence[Sequence[str]]) -> None:
    """Write a file with one line per problem. If there are none, no file is written."""
    path.unlink(missing_ok=True)
    if problems:
        lines = ("\t".join(problem).replace("\n", " ") + "\n" for problem in problems)
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def check_broken(what: str, count: int, total: int, most: int | None, path: Path) -> None:
    """Print how many items were left out, or raise an error if too many are broken.

    Args:
        what: Description of the broken items, such as "3 of 18 images".
        count: Number of broken items.
        total: Number of all items.
        most: Maximum number to leave out. If None, 1% of ``total``.
        path: Path of the problem list.

    Raises:
        ArgumentError: More than ``most`` items are broken.
    """
    limit = max(1, total // 100) if most is None else most
    if count > limit:
        raise ArgumentError(
            f"too many broken items: {what}, but the limit is {limit}. {path} lists them. No data set was "
            "written. Repair the items, or run the same command again with a larger --max-broken."
        )
    if count:
        say(f"skipped broken items: {what}. {path} lists them.")


def make(source: Source, format: str, shards: int, resize: int) -> tuple[SplitPlan, Array]:
    """Plan a split: distribute its images over files in a fixed random order.

    Returns:
        The plan without ``names_at``, and the image numbers in the new order.
    """
    images = len(source.places)
    if not 0 < shards <= images:
        raise ArgumentError(f"--shards {shards}: {source.split} has {images} images. Use 1 to {images}.")
    order = np.random.RandomState(_SEED).permutation(images)
    first = [0, *np.cumsum([len(part) for part in np.array_split(order, shards)]).tolist()]
    plan = SplitPlan(
        source.split, format, shards, resize, source.fingerprint, images, source.size, source.root,
        source.classes, source.tars, first, source.changed,
    )  # fmt: skip
    return plan, order


def store(plan: SplitPlan, source: Source, order: Array, destination: Path) -> SplitPlan:
    """Write a plan to disk, and return it with ``names_at``.

    The JSON file is written last, so if it exists, the other files are complete.
    """
    directory = state(destination)
    names_at = [0]
    with open(directory / f"{plan.split}.names", "wb") as file:
        for begin, end in zip(plan.first, plan.first[1:], strict=False):
            text = "".join(f"{source.name(number)}\n" for number in order[begin:end])
            names_at.append(names_at[-1] + file.write(text.encode(errors="surrogateescape")))
    np.save(directory / f"{plan.split}.places.npy", source.places[order])
    stored = replace(plan, names_at=names_at)
    write_whole(directory / f"{plan.split}.json", json.dumps(asdict(stored)).encode())
    return stored
