"""Find the images of ImageNet, or of any directories of classes, and their labels.

Classes are numbered from 0 in the order of their directories' names, as torchvision's ``ImageFolder`` does.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.prepare.labels import class_texts, validation_labels
from ringdance.errors import ArgumentError

PLACE = np.dtype([("file", "<i4"), ("label", "<i4"), ("offset", "<u8"), ("length", "<u8")])
"""Where an image is: number of the tar (-1: a file of its own), class, first byte, number of bytes."""

Places = np.ndarray[Any, np.dtype[np.void]]
Found = tuple[str, str, str, int, int, int]
"""An image: class or "", name, tar or "", first byte, number of bytes, when its file last changed, in ns."""

SPLITS = {"train": ("train",), "validation": ("val", "validation")}
_TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
_KAGGLE = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")
_IMAGE = re.compile(r"\.(jpe?g|png|gif|bmp|webp|tiff?)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """The images of a split.

    Attributes:
        split: "train" or "validation".
        root: directory of the images that are files.
        classes: names of the directories, sorted.
        texts: what classes are called, by directory.
        tars: files that contain images.
        names: of the images, relative to `root` or as in the tar: UTF-8, with a newline behind each.
        ends: shape (images,), int64: where the next name begins.
        changed: a hash of the times of their files' last changes.
        places: of the images, in the same order; dtype PLACE.
    """

    split: str
    root: str
    classes: Sequence[str]
    texts: Mapping[str, str]
    tars: Sequence[str]
    names: bytearray  # one buffer, as ImageNet-21k has 14 million
    ends: np.ndarray[Any, Any]
    changed: str
    places: Places

    def name(self, number: int) -> str:
        """Return the name of an image."""
        begin = self.ends[number - 1] if number else 0
        return self.names[begin : self.ends[number] - 1].decode(errors="surrogateescape")

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return int(self.places["length"].sum())

    @property
    def fingerprint(self) -> str:
        """A hash of names, sizes, labels and texts."""
        found = hashlib.sha256(self.names)
        found.update("\n".join(["", *self.classes]).encode(errors="surrogateescape"))
        found.update(repr(sorted(self.texts.items())).encode())
        found.update(np.ascontiguousarray(self.places).view(np.uint8))
        return found.hexdigest()


def find(source: Path, splits: Sequence[str] = (), labels: Path | None = None) -> list[Source]:
    """Find the images under `source`, which may be any of the layouts of the class's documentation.

    Args:
        source: a directory of class directories or of ``train`` and ``val``, of Kaggle's or official files.
        splits: those wanted; by default all that are there. Classes alone are the first of them.
        labels: file with the labels of validation images that are in no class directories.

    Raises:
        ArgumentError: nothing is found, or labels are missing; names what was looked for.
    """
    if not source.is_dir():
        raise ArgumentError(f"{source}: no such directory. SRC is the directory that has the images or tars")
    there = {split: place for split in SPLITS if (place := _place(source, split))}
    if not there:
        if not _class_names(source):
            raise ArgumentError(
                f"{source}: no images found. Looked for directories of classes (n01440764/*.JPEG), for train "
                f"and val (also in ILSVRC/Data/CLS-LOC), and for {' and '.join(_TARS.values())}"
            )
        there = {splits[0] if splits else "train": source}
    missing = [split for split in splits if split not in there]
    if missing:
        raise ArgumentError(f"{source}: no images of {', '.join(missing)}; it has {', '.join(there)}")
    known = _class_names(there["train"]) if "train" in there else []
    texts = class_texts(source)
    return [
        _source(split, place, source, known, texts, labels)
        for split, place in there.items() if not splits or split in splits
    ]  # fmt: skip


def _place(source: Path, split: str) -> Path | None:
    """Return the directory or the tar of a split."""
    for parent in _KAGGLE:
        for name in (*SPLITS[split], _TARS[split]):
            if os.path.lexists(path := source / parent / name):  # a link to nothing is not another layout
                return path
    return None


def _source(
    split: str, place: Path, source: Path, known: Sequence[str], texts: Mapping[str, str], labels: Path | None
) -> Source:
    """List the images of a split and number their classes; objects of one class are in memory at a time."""
    text, ends, places, changed = bytearray(), bytearray(), bytearray(), hashlib.sha256()
    there: dict[str, int] = {}
    files = {"": 0}
    images = _in_tar(place) if place.is_file() else _in_directory(place)
    for directory, group in groupby(images, lambda one: one[0]):
        some = sorted(group, key=lambda one: one[1])
        flat = [one[1] for one in some if not directory]
        by_name = validation_labels(source, place, flat, known, labels) if flat else {}
        rows = []
        for _, name, tar, *where, _ in some:
            label = there.setdefault(directory or by_name[name], len(there))
            rows.append((files.setdefault(tar, len(files)), label, *where))
        places += np.array(rows, PLACE).tobytes()
        changed.update(np.array([one[-1] for one in some]).tobytes())
        if broken := next((one[1] for one in some if "\n" in one[1]), None):
            raise ArgumentError(f"{place}: the name {broken!r} contains a newline")
        added = "".join(f"{one[1]}\n" for one in some).encode(errors="surrogateescape")
        newlines = np.flatnonzero(np.frombuffer(added, np.uint8) == ord("\n"))
        ends += (newlines + (len(text) + 1)).tobytes()
        text += added
    if not text:
        raise ArgumentError(f"{place}: no images in it")
    classes = list(known) or sorted(there)
    if strange := sorted(there.keys() - set(classes)):
        raise ArgumentError(f"{place}: classes that train does not have: {', '.join(strange[:5])}")
    if split == "train" and (empty := sorted(set(classes) - there.keys())):
        for name in empty if place.is_dir() else ():
            if other := next((one for one in (place / name).glob("[!.]*") if one.is_file()), None):
                raise ArgumentError(f"{place} is no directory of classes: {name} has {other.name}, no images")
        raise ArgumentError(
            f"{place}: classes without images: {', '.join(empty[:5])}. Remove them, or complete SRC"
        )
    if strange := [name for name in classes if name != name.encode(errors="replace").decode()]:
        raise ArgumentError(f"{place}: the name of the class {strange[0]!r} is not UTF-8: rename it")
    found, tars = np.frombuffer(places, PLACE), sorted(files.keys() - {""})
    for field, order, kinds in (("label", classes, there), ("file", tars, files)):
        numbers = {name: number for number, name in enumerate(order)}
        found[field] = np.array([numbers.get(name, -1) for name in kinds], np.int32)[found[field]]
    root = os.path.abspath(place if place.is_dir() else place.parent)
    used = {name: texts[name] for name in classes if name in texts}
    begins_next = np.frombuffer(ends, np.int64)
    return Source(split, root, classes, used, tars, text, begins_next, changed.hexdigest(), found)


def _class_names(place: Path) -> list[str]:
    """Return the classes by the names of directories or inner tars; [] for a directory of images."""
    if place.is_file():
        with _tar(place) as tar:
            return sorted(Path(one.name).stem for one in tar if one.name.endswith(".tar"))
    names = [one.name for one in os.scandir(place) if one.is_dir() and not one.name.startswith(".")]
    return sorted([*names, *(one.stem for one in place.glob("*.tar"))])


def _in_directory(root: Path) -> Iterator[Found]:
    """Iterate over images in class directories, in tars of classes, and in the directory itself, by class."""
    above = [os.path.realpath(root)]

    def class_of(entry: os.DirEntry[str]) -> str:
        tar = entry.name.removesuffix(".tar")
        return entry.name if entry.is_dir() else tar if tar != entry.name else ""

    for entry in sorted(os.scandir(root), key=class_of):
        if entry.name.startswith("."):
            continue
        if _is_directory(entry, above):
            for name, size, changed in _walk(entry.path, entry.name, above):
                yield entry.name, name, "", 0, size, changed
        elif entry.name.endswith(".tar"):
            with _tar(entry.path) as tar:
                for name, offset, size in _members(tar):
                    directory = entry.name[:-4]
                    place, changed = os.path.abspath(entry.path), entry.stat().st_mtime_ns
                    yield directory, f"{directory}/{name}", place, offset, size, changed
        elif _is_image(entry):
            yield "", entry.name, "", 0, entry.stat().st_size, entry.stat().st_mtime_ns


def _walk(directory: str, name: str, above: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    above = [*above, os.path.realpath(directory)]
    for entry in os.scandir(directory):
        if _is_directory(entry, above):
            yield from _walk(entry.path, f"{name}/{entry.name}", above)
        elif _is_image(entry):
            yield f"{name}/{entry.name}", entry.stat().st_size, entry.stat().st_mtime_ns


def _is_directory(entry: os.DirEntry[str], above: Sequence[str]) -> bool:
    """Whether a directory; raises ArgumentError for a link to nothing, or to one that it is in."""
    suffix = os.path.splitext(entry.name)[1].lower()
    wanted = not entry.name.startswith(".") and suffix in ("", ".tar")
    if entry.is_symlink() and wanted and not os.path.exists(entry.path):
        raise ArgumentError(f"{entry.path} links to nothing that is there: complete SRC, or remove the link")
    if entry.is_symlink() and entry.is_dir():
        there = os.path.realpath(entry.path)
        if any(f"{path}/".startswith(f"{there}/") for path in above):
            raise ArgumentError(f"{entry.path} links to a directory above it: remove the link")
    return entry.is_dir()


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether a file is named like an image; raises ArgumentError if reading it might not end."""
    if not _IMAGE.search(entry.name) or entry.name.startswith("."):
        return False
    if not entry.is_file():
        raise ArgumentError(f"{entry.path} is named like an image, but is no regular file: remove it")
    return True


def _in_tar(path: Path) -> Iterator[Found]:
    """Iterate over the images of an official tar, by class: of tars of classes, or of images without one."""

    def class_of(member: tarfile.TarInfo) -> str:
        return Path(member.name).stem if member.name.endswith(".tar") else ""

    place, changed = os.path.abspath(path), path.stat().st_mtime_ns
    with _tar(path) as tar:
        for member in sorted(tar, key=class_of):
            if directory := class_of(member):
                with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                    for name, offset, size in _members(inner):
                        offset += member.offset_data
                        yield directory, f"{directory}/{name}", place, offset, size, changed
            elif member.isfile() and _IMAGE.search(member.name):
                yield "", Path(member.name).name, place, member.offset_data, member.size, changed


@contextmanager
def _tar(path: Path | str) -> Iterator[tarfile.TarFile]:
    """Open a tar; raise an ArgumentError if it cannot be read to its end."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield tar
    except tarfile.TarError as error:
        raise ArgumentError(f"{path}: {error}. Is the download complete?") from None


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, int, int]]:
    for member in tar:
        if member.isfile() and _IMAGE.search(member.name):
            yield member.name.removeprefix("./"), member.offset_data, member.size
