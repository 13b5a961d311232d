"""Find the images of ImageNet, or of any directories of classes, and their labels.

Classes are numbered from 0 in the order of their directories' names, as torchvision's ``ImageFolder`` does.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.prepare.labels import validation_labels
from ringdance.data.prepare.progress import counted, say
from ringdance.errors import ArgumentError

PLACE = np.dtype([("file", "<i4"), ("label", "<i4"), ("offset", "<u8"), ("length", "<u8")])
"""Where an image is: number of the tar (-1: a file of its own), class, first byte, number of bytes."""

Places = np.ndarray[Any, np.dtype[np.void]]
LeftOut = defaultdict[str, list[str]]
Found = tuple[str, str, str, int, int, int]
"""An image: class or "", name, tar or "", first byte, number of bytes, when its file last changed, in ns."""

SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation")}
_TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
_KAGGLE = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")
_IMAGE = re.compile(r"\.(jpe?g|jpe|jfif|png|gif|bmp|webp|tiff?|p[bgpn]m|avif)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """The images of a split.

    Attributes:
        split: "train" or "validation".
        root: directory of the images that are files.
        classes: names of the directories, sorted.
        tars: files that contain images.
        names: of the images, relative to `root` or as in the tar: UTF-8, with a newline behind each.
        ends: shape (images,), int64: where the next name begins.
        changed: a hash of the times of their files' last changes.
        places: of the images, in the same order; dtype PLACE.
        left_out: names of other files next to them, by their endings.
    """

    split: str
    root: str
    classes: Sequence[str]
    tars: Sequence[str]
    names: bytearray  # one buffer, as ImageNet-21k has 14 million
    ends: np.ndarray[Any, Any]
    changed: str
    places: Places
    left_out: Mapping[str, Sequence[str]]

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
        """A hash of names, sizes and labels."""
        found = hashlib.sha256(self.names)
        found.update("\n".join(["", *self.classes]).encode(errors="surrogateescape"))
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
    # A class may be called train: then it has images of its own, and so have its neighbors.
    if any(map(_own_images, there.values())) and any(_own_images(one) for one in _beside(there.values())):
        there = {}
    if others := [one.name for one in _beside(there.values()) if _is_data(one)]:
        say(f"not taken, as neither train nor validation: {counted(others)}; as SRC, --split takes one")
    if not there:
        if not _class_names(source):
            raise ArgumentError(
                f"{source}: no images found. Looked for directories of classes (n01440764/*.JPEG), for train "
                f"and val (also in ILSVRC/Data/CLS-LOC), and for {' and '.join(_TARS.values())}"
            )
        there = {splits[0] if splits else "train": source}
    for split in splits or there:
        _check_classes(there.get(split, source))
    missing = [split for split in splits if split not in there]
    if missing:
        raise ArgumentError(f"{source}: no images of {', '.join(missing)}; it has {', '.join(there)}")
    known = _class_names(there["train"]) if "train" in there else []
    return [
        _source(split, place, source, known, labels)
        for split, place in there.items() if not splits or split in splits
    ]  # fmt: skip


def _place(source: Path, split: str) -> Path | None:
    """Return the directory or the tar of a split."""
    for parent in (source / one for one in _KAGGLE):
        names = sorted(os.listdir(parent)) if parent.is_dir() else []  # links to nothing too
        found = [name for name in names if name.lower() in SPLITS[split]]
        if len(found) > 1:
            raise ArgumentError(f"{parent} has {' and '.join(found)}, and either may be {split}: rename one")
        if found or _TARS[split] in names:
            return parent / (found or [_TARS[split]])[0]
    return None


def _beside(places: Collection[Path]) -> list[Path]:
    """Return what is beside the places of splits, except what is hidden."""
    found = {one for place in places for one in place.parent.glob("[!.]*")}
    return sorted(found - {*places})


def _own_images(place: Path) -> bool:
    """Whether a directory has images in itself, not only in others."""
    return place.is_dir() and any(_IMAGE.search(one.name) and one.is_file() for one in os.scandir(place))


def _is_data(path: Path) -> bool:
    """Whether something is an image or a tar, or a directory with images."""
    names = (name for _, _, names in os.walk(path) for name in names) if path.is_dir() else [path.name]
    return any(_IMAGE.search(name) or name.endswith(".tar") for name in names)


def _check_classes(place: Path) -> None:
    """Raise an ArgumentError if what look like classes are others' directories, such as splits."""
    there = [place / name for name in _class_names(place)] if place.is_dir() else []
    if not all(one.is_dir() for one in there) or any(map(_own_images, (place, *there))):
        return
    inner = [{one.name for one in os.scandir(directory) if one.is_dir()} for directory in there]
    common = sorted(set[str]().union(*inner).intersection(*inner))
    if len(common) > (len(there) > 1):
        raise ArgumentError(
            f"{place}: {', '.join(one.name for one in there[:5])} have no images of their own, but each has "
            f"{', '.join(common[:5])}. Are they splits? Name them train and val, or give {there[0]} as SRC"
        )


def _source(
    split: str, place: Path, source: Path, known: Sequence[str], labels: Path | None
) -> Source:
    """List the images of a split and number their classes; objects of one class are in memory at a time."""
    text, ends, places, changed = bytearray(), bytearray(), bytearray(), hashlib.sha256()
    there: dict[str, int] = {}
    files = {"": 0}
    left_out: LeftOut = defaultdict(list)
    images = _in_tar(place, left_out) if place.is_file() else _in_directory(place, left_out)
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
    begins_next = np.frombuffer(ends, np.int64)
    return Source(split, root, classes, tars, text, begins_next, changed.hexdigest(), found, left_out)


def _class_names(place: Path) -> list[str]:
    """Return the classes by the names of directories or inner tars; [] for a directory of images."""
    if place.is_file():
        with open_tar(place) as tar:
            return sorted(Path(one.name).stem for one in tar if one.name.endswith(".tar"))
    names = [one.name for one in os.scandir(place) if one.is_dir() and not one.name.startswith(".")]
    return sorted([*names, *(one.stem for one in place.glob("[!.]*.tar"))])


def _in_directory(root: Path, left_out: LeftOut) -> Iterator[Found]:
    """Iterate over images in class directories, in tars of classes, and in the directory itself, by class."""
    above = [os.path.realpath(root)]

    def class_of(entry: os.DirEntry[str]) -> str:
        tar = entry.name.removesuffix(".tar")
        return entry.name if entry.is_dir() else tar if tar != entry.name else ""

    for entry in sorted(os.scandir(root), key=class_of):
        if _is_directory(entry, above):
            for name, size, changed in _walk(entry.path, entry.name, above, left_out):
                yield entry.name, name, "", 0, size, changed
        elif entry.name.endswith(".tar") and not entry.name.startswith("."):
            with open_tar(entry.path) as tar:
                for name, offset, size in _members(tar, left_out):
                    directory = entry.name[:-4]
                    place, changed = os.path.abspath(entry.path), entry.stat().st_mtime_ns
                    yield directory, f"{directory}/{name}", place, offset, size, changed
        elif _is_image(entry, left_out):
            yield "", entry.name, "", 0, entry.stat().st_size, entry.stat().st_mtime_ns


def _walk(
    directory: str, name: str, above: Sequence[str], left_out: LeftOut
) -> Iterator[tuple[str, int, int]]:
    above = [*above, os.path.realpath(directory)]
    for entry in os.scandir(directory):
        if _is_directory(entry, above):
            yield from _walk(entry.path, f"{name}/{entry.name}", above, left_out)
        elif _is_image(entry, left_out):
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
    return entry.is_dir() and not entry.name.startswith(".")


def _is_image(entry: os.DirEntry[str], left_out: LeftOut) -> bool:
    """Whether a file is named like an image; raises ArgumentError if reading it might not end."""
    if not _is_named(entry.path, left_out):
        return False
    if not entry.is_file():
        raise ArgumentError(f"{entry.path} is named like an image, but is no regular file: remove it")
    return True


def _is_named(path: str, left_out: LeftOut) -> bool:
    """Whether a path is named like an image; otherwise note it."""
    name = path.rpartition("/")[2]
    if _IMAGE.search(name) and not name.startswith("."):
        return True
    left_out["hidden" if name.startswith(".") else Path(name).suffix.lower() or "no ending"].append(path)
    return False


def _is_member(member: tarfile.TarInfo, left_out: LeftOut) -> bool:
    """Whether a member of a tar is an image; otherwise note it."""
    if not member.isfile() and not member.isdir():
        left_out["links"].append(member.name)
    return member.isfile() and _is_named(member.name, left_out)


def _in_tar(path: Path, left_out: LeftOut) -> Iterator[Found]:
    """Iterate over the images of an official tar, by class: of tars of classes, or of images without one."""

    def class_of(member: tarfile.TarInfo) -> str:
        return Path(member.name).stem if member.name.endswith(".tar") else ""

    place, changed = os.path.abspath(path), path.stat().st_mtime_ns
    with open_tar(path) as tar:
        for member in sorted(tar, key=class_of):
            if directory := class_of(member):
                with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                    for name, offset, size in _members(inner, left_out):
                        offset += member.offset_data
                        yield directory, f"{directory}/{name}", place, offset, size, changed
                    _check_end(inner)
            elif _is_member(member, left_out):
                yield "", Path(member.name).name, place, member.offset_data, member.size, changed


@contextmanager
def open_tar(path: Path | str) -> Iterator[tarfile.TarFile]:
    """Open a tar; raise an ArgumentError if it cannot be read to its end."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield tar
            _check_end(tar)
    except tarfile.TarError as error:
        raise ArgumentError(f"{path}: {error}. Is the download complete?") from None


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise ReadError if members follow the last one, as Python takes a damaged header for the end."""
    tar.getmembers()
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(f"it continues after its end, byte {tar.offset}: damaged, or tars joined")


def _members(tar: tarfile.TarFile, left_out: LeftOut) -> Iterator[tuple[str, int, int]]:
    for member in tar:
        if _is_member(member, left_out):
            yield member.name.removeprefix("./"), member.offset_data, member.size
