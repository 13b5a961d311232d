"""What is to be written: which image goes into which file. On disk, for the processes that write.

In ``DST/.prepare`` a split has ``train.json`` (options, source, where each file's images begin in the next
two), ``train.places.npy`` and ``train.names``; a finished file has ``NAME.rows.npy`` and ``NAME.json``, the
latter written last, with the checksum of the former. When all are finished only ``train.json`` stays: it
tells a later run what was done.
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
from ringdance.data.files import file_crc32c, write_whole
from ringdance.data.prepare.progress import say
from ringdance.data.prepare.sources import Source
from ringdance.data.writing import shard_name
from ringdance.errors import ArgumentError

T = TypeVar("T")
DAMAGE = (ValueError, TypeError, LookupError, AttributeError)
"""What a damaged JSON file ends in, where it is parsed or used."""
_SEED = 0


@dataclass(frozen=True)
class Plan:
    """The files of a split.

    Attributes:
        split: such as "train".
        format: "tfrecord" or "webdataset".
        shards: number of files.
        resize: of images' shorter sides in pixels, or 0.
        fingerprint: of the source.
        images: number of them.
        size: in bytes.
        root, classes, tars, changed: as of the source.
        first: number of the first image of each file, and of all images.
        names_at: where its names begin in the file of names, and the size of that.
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
    def read(cls, destination: Path, split: str) -> Plan | None:
        """Read a split's plan; None if there is none."""
        return read_plan(state(destination) / f"{split}.json", lambda about: cls(**about))

    def name(self, shard: int) -> str:
        """Return the name of a file."""
        return shard_name(self.split, shard, self.shards, self.format)

    def images_of(self, destination: Path, shard: int) -> tuple[list[str], Rows]:
        """Return names and places of the images of a file."""
        directory = state(destination)
        begin, end = self.names_at[shard : shard + 2]
        with open(directory / f"{self.split}.names", "rb") as file:
            data = os.pread(file.fileno(), end - begin, begin)
        places = np.load(directory / f"{self.split}.places.npy", mmap_mode="r")
        names = data.decode(errors="surrogateescape").split("\n")[:-1]
        return names, places[self.first[shard] : self.first[shard + 1]]

    def finished(self, destination: Path, shard: int) -> dict[str, Any] | None:
        """Return what was noted of a finished file; None if it is not there, or not as it was written."""
        return finished(destination, self.name(shard))

    def differences(self, other: Plan) -> list[str]:
        """Return what a plan has otherwise, for people."""
        found = differences(self, other, "format", "shards", "resize")
        if self.fingerprint != other.fingerprint:
            number = f"{self.images} instead of {other.images}"
            found.append(f"other images ({number}, or other sizes, names or labels)")
        return found

    def close(self, destination: Path) -> Dataset:
        """Write the index of the finished files and remove what was needed until then."""
        reports = [self.finished(destination, shard) for shard in range(self.shards)]
        if None in reports:
            raise ArgumentError(f"{self.name(reports.index(None))} disappeared from {destination}")
        names = map(self.name, range(self.shards))
        rows = joined(np.load(state(destination) / f"{name}.rows.npy") for name in names)
        files = [ShardFile(**report["file"]) for report in reports if report]
        Dataset(destination, self.split, self.format, self.classes, files, rows).write()
        self.remove_state(destination, keep=f"{self.split}.json")
        return Dataset.open(destination, self.split)

    def remove_state(self, destination: Path, keep: str = "") -> None:
        """Remove the split's files in ``.prepare``, except one."""
        for path in state(destination).glob(f"{self.split}*"):
            if path.name != keep and path.name.startswith((f"{self.split}.", f"{self.split}-")):
                path.unlink()


def differences(plan: Any, former: Any, *options: str) -> list[str]:
    """Return which options a plan has otherwise than a former one."""
    values = ((name, getattr(plan, name) or "none", getattr(former, name) or "none") for name in options)
    changed = (one for one in values if one[1] != one[2])
    return [f"--{name.replace('_', '-')} {now} instead of {before}" for name, now, before in changed]


def state(destination: Path) -> Path:
    """Return the directory of the preparation's own files."""
    return destination / ".prepare"


def read_plan(path: Path, made: Callable[[Any], T]) -> T | None:
    """Return what is made of the JSON in a file; None if there is none.

    Raises:
        ArgumentError: the file is damaged.
    """
    try:
        return made(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except DAMAGE:
        raise ArgumentError(f"{path} is damaged. Begin anew with --overwrite") from None


def finished(destination: Path, name: str) -> dict[str, Any] | None:
    """Return what was noted of a finished file; None if it is not there, or not as it was written."""
    directory = state(destination)
    try:
        about: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
        same = (destination / name).stat().st_size == about["file"]["size"]
        return about if same and unchanged(directory, about.get("crc32c", {})) else None
    except (FileNotFoundError, *DAMAGE):
        return None


def unchanged(directory: Path, checksums: Mapping[str, int]) -> bool:
    """Whether files have the CRC-32C that were noted, by name."""
    return all(file_crc32c(directory / name) == crc for name, crc in checksums.items())


def listed(path: Path, mark: bytes) -> int:
    """Return how often `mark` is in a list of problems; 0 if there is none."""
    return path.read_bytes().count(mark) if path.exists() else 0


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Keep other runs out, where the file system knows locks; remove what killed ones have left."""
    with open(state(destination) / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another `ringdance data prepare` is writing to {destination}") from None
        except OSError:
            pass
        for path in [*destination.glob(".*-*-of-*"), *state(destination).glob(".*")]:
            path.unlink(missing_ok=True)
        yield


def list_problems(path: Path, problems: Sequence[Sequence[str]]) -> None:
    """List problems in a file, a line for each; no file if there are none."""
    path.unlink(missing_ok=True)
    if problems:
        lines = ("\t".join(one).replace("\n", " ") + "\n" for one in problems)
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def check_broken(what: str, count: int, total: int, most: int | None, path: Path) -> None:
    """Say how much is broken.

    Args:
        what: Is broken, such as "3 of 18 images".
        count: How many.
        total: Of how many.
        most: May be left out; None: one in a hundred.
        path: Of the list.

    Raises:
        ArgumentError: More are broken.
    """
    limit = max(1, total // 100) if most is None else most
    if count > limit:
        raise ArgumentError(
            f"{what} are broken, listed in {path}: more than --max-broken {limit}, so the data set is not "
            "written. Correct them, or give the same command a larger --max-broken"
        )
    if count:
        say(f"{what} are broken, listed in {path}, and left out")


def make(source: Source, format: str, shards: int, resize: int) -> tuple[Plan, np.ndarray[Any, Any]]:
    """Shuffle the images of a split into files, always in the same way.

    Returns:
        The plan without places of names, and the numbers of the images in their new order.
    """
    images = len(source.places)
    if not 0 < shards <= images:
        raise ArgumentError(f"--shards {shards}: {source.split} has {images} images, so 1 to {images} files")
    order = np.random.RandomState(_SEED).permutation(images)
    first = [0, *np.cumsum([len(part) for part in np.array_split(order, shards)]).tolist()]
    plan = Plan(
        source.split, format, shards, resize, source.fingerprint, images, source.size, source.root,
        source.classes, source.tars, first, source.changed,
    )  # fmt: skip
    return plan, order


def store(plan: Plan, source: Source, order: np.ndarray[Any, Any], destination: Path) -> Plan:
    """Write a plan for the processes; its own file comes last."""
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
