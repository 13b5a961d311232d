"""Find images and their labels in the layouts of ImageNet, or in other class directories.

Classes are numbered from 0 in the order of their directory names, as in torchvision's ``ImageFolder``.
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
"""An image's location: number of the tar (-1 for a separate file), class, offset and size in bytes."""

Places = np.ndarray[Any, np.dtype[np.void]]
LeftOut = defaultdict[str, list[str]]
Found = tuple[str, str, str, int, int, int]
"""An image: class, name, tar (empty for a separate file), offset, size, file's modification time in ns."""

SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation")}
_TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
_KAGGLE = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")
_IMAGE = re.compile(r"\.(jpe?g|jpe|jfif|png|gif|bmp|webp|tiff?|p[bgpn]m|avif)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """The images of a split.

    Attributes:
        split: "train" or "validation".
        root: Base directory for the names of images outside of tars.
        classes: Names of the class directories, sorted.
        tars: Paths of the tars that contain images.
        names: Names of the images, relative to ``root`` or as in the tar, in UTF-8 with a newline after each.
        ends: Shape (images,), int64. End offset of each name in ``names``, including the newline.
        changed: Hash of the modification times of all files that contain images.
        places: Locations of the images, in the order of ``names``. dtype ``PLACE``.
        left_out: Paths of files that are not images, by suffix.
    """

    split: str
    root: str
    classes: Sequence[str]
    tars: Sequence[str]
    names: bytearray  # one buffer to save memory: ImageNet-21k has 14 million names
    ends: np.ndarray[Any, Any]
    changed: str
    places: Places
    left_out: Mapping[str, Sequence[str]]

    def name(self, number: int) -> str:
        """Return an image's name."""
        begin = self.ends[number - 1] if number else 0
        return self.names[begin : self.ends[number] - 1].decode(errors="surrogateescape")

    @property
    def size(self) -> int:
        """Total size of the images in bytes."""
        return int(self.places["length"].sum())

    @property
    def fingerprint(self) -> str:
        """Hash of the names, sizes and labels."""
        digest = hashlib.sha256(self.names)
        digest.update("\n".join(["", *self.classes]).encode(errors="surrogateescape"))
        digest.update(np.ascontiguousarray(self.places).view(np.uint8))
        return digest.hexdigest()


def find(source: Path, splits: Sequence[str] = (), labels: Path | None = None) -> list[Source]:
    """Find the images in a directory, in any layout that ``ringdance data prepare imagenet --help`` lists.

    Args:
        source: Directory that contains one of: class directories; ``train`` and ``val`` directories; Kaggle's
            files; the official tar files.
        splits: Splits to find. Defaults to all that exist. If ``source`` has no splits but only class
            directories, they become the first of these splits, or "train".
        labels: File with the labels of validation images that are not in class directories.

    Raises:
        ArgumentError: No images are found, labels are missing, or the layout is ambiguous.
    """
    if not source.is_dir():
        raise ArgumentError(f"{source} is not a directory. SRC must be a directory with images or tars.")
    places = {split: place for split in SPLITS if (place := _place(source, split))}
    # If "train" and its sibling directories directly contain images, they are classes, not splits.
    if any(map(_own_images, places.values())) and any(_own_images(path) for path in _beside(places.values())):
        places = {}
    if others := [path.name for path in _beside(places.values()) if _is_data(path)]:
        say(
            f"not read, because they are neither train nor validation: {counted(others)}. To read one, pass "
            "it as SRC."
        )
    if not places:
        if not _class_names(source):
            raise ArgumentError(
                f"{source}: no images found. Looked for class directories (n01440764/*.JPEG), for train "
                f"and val (also in ILSVRC/Data/CLS-LOC), and for {' and '.join(_TARS.values())}."
            )
        places = {splits[0] if splits else "train": source}
    for split in splits or places:
        _check_classes(places.get(split, source))
    missing = [split for split in splits if split not in places]
    if missing:
        raise ArgumentError(f"{source} has images of {', '.join(places)}, but not of {', '.join(missing)}.")
    known = _class_names(places["train"]) if "train" in places else []
    return [
        _source(split, place, source, known, labels)
        for split, place in places.items() if not splits or split in splits
    ]  # fmt: skip


def _place(source: Path, split: str) -> Path | None:
    """Return a split's directory or tar, or None if neither exists."""
    for parent in (source / directory for directory in _KAGGLE):
        names = sorted(os.listdir(parent)) if parent.is_dir() else []  # listdir includes broken links
        matches = [name for name in names if name.lower() in SPLITS[split]]
        if len(matches) > 1:
            raise ArgumentError(
                f"{parent} has {' and '.join(matches)}, but only one can be {split}. Rename the others."
            )
        if matches or _TARS[split] in names:
            return parent / (matches or [_TARS[split]])[0]
    return None


def _beside(places: Collection[Path]) -> list[Path]:
    """Return the siblings of the splits' directories or tars, except hidden files."""
    neighbors = {path for place in places for path in place.parent.glob("[!.]*")}
    return sorted(neighbors - {*places})


def _own_images(place: Path) -> bool:
    """Return True if a directory contains images directly, and not only in subdirectories."""
    return place.is_dir() and any(_IMAGE.search(file.name) and file.is_file() for file in os.scandir(place))


def _is_data(path: Path) -> bool:
    """Return True for an image, a tar, or a directory that contains images."""
    names = (name for _, _, names in os.walk(path) for name in names) if path.is_dir() else [path.name]
    return any(_IMAGE.search(name) or name.endswith(".tar") for name in names)


def _check_classes(place: Path) -> None:
    """Raise an ArgumentError if the directories in ``place`` look like splits rather than classes."""
    classes = [place / name for name in _class_names(place)] if place.is_dir() else []
    if not all(path.is_dir() for path in classes) or any(map(_own_images, (place, *classes))):
        return
    inner = [{entry.name for entry in os.scandir(path) if entry.is_dir()} for path in classes]
    common = sorted(set[str]().union(*inner).intersection(*inner))
    if len(common) > (len(classes) > 1):
        raise ArgumentError(
            f"{place}: {', '.join(one.name for one in classes[:5])} contain no images, but all contain "
            f"{', '.join(common[:5])}. Are they splits? Name them train and val, or use {classes[0]} as SRC."
        )


def _source(split: str, place: Path, source: Path, known: Sequence[str], labels: Path | None) -> Source:
    """List a split's images, and number the classes. To save memory, converts each class to arrays."""
    text, ends, places, changed = bytearray(), bytearray(), bytearray(), hashlib.sha256()
    numbers_by_class: dict[str, int] = {}
    files = {"": 0}
    left_out: LeftOut = defaultdict(list)
    images = _in_tar(place, left_out) if place.is_file() else _in_directory(place, left_out)
    for directory, group in groupby(images, lambda image: image[0]):
        members = sorted(group, key=lambda image: image[1])
        flat = [image[1] for image in members if not directory]
        by_name = validation_labels(source, place, flat, known, labels) if flat else {}
        rows = []
        for _, name, tar, *where, _ in members:
            label = numbers_by_class.setdefault(directory or by_name[name], len(numbers_by_class))
            rows.append((files.setdefault(tar, len(files)), label, *where))
        places += np.array(rows, PLACE).tobytes()
        changed.update(np.array([image[-1] for image in members]).tobytes())
        if broken := next((image[1] for image in members if "\n" in image[1]), None):
            raise ArgumentError(f"{place}: the name {broken!r} contains a newline. Rename the file.")
        added = "".join(f"{one[1]}\n" for one in members).encode(errors="surrogateescape")
        newlines = np.flatnonzero(np.frombuffer(added, np.uint8) == ord("\n"))
        ends += (newlines + (len(text) + 1)).tobytes()
        text += added
    if not text:
        raise ArgumentError(f"{place} contains no images.")
    classes = list(known) or sorted(numbers_by_class)
    if strange := sorted(numbers_by_class.keys() - set(classes)):
        raise ArgumentError(f"{place} has classes that train does not have: {', '.join(strange[:5])}.")
    if split == "train" and (empty := sorted(set(classes) - numbers_by_class.keys())):
        for name in empty if place.is_dir() else ():
            if other := next((path for path in (place / name).glob("[!.]*") if path.is_file()), None):
                raise ArgumentError(
                    f"{place} is not divided into classes: {name} contains {other.name}, but no images."
                )
        raise ArgumentError(
            f"{place} has classes without images: {', '.join(empty[:5])}. Add their images, or remove the "
            "empty classes."
        )
    if strange := [name for name in classes if name != name.encode(errors="replace").decode()]:
        raise ArgumentError(f"{place}: the name of the class {strange[0]!r} is not UTF-8. Rename it.")
    locations, tars = np.frombuffer(places, PLACE), sorted(files.keys() - {""})
    for field, order, kinds in (("label", classes, numbers_by_class), ("file", tars, files)):
        numbers = {name: number for number, name in enumerate(order)}
        locations[field] = np.array([numbers.get(name, -1) for name in kinds], np.int32)[locations[field]]
    root = os.path.abspath(place if place.is_dir() else place.parent)
    begins_next = np.frombuffer(ends, np.int64)
    return Source(split, root, classes, tars, text, begins_next, changed.hexdigest(), locations, left_out)


def _class_names(place: Path) -> list[str]:
    """Return the names of class directories or class tars, sorted."""
    if place.is_file():
        with open_tar(place) as tar:
            return sorted(Path(entry.name).stem for entry in tar if entry.name.endswith(".tar"))
    names = [entry.name for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith(".")]
    return sorted([*names, *(entry.stem for entry in place.glob("[!.]*.tar"))])


def _in_directory(root: Path, left_out: LeftOut) -> Iterator[Found]:
    """Yield images by class, from class directories, class tars, and the directory itself."""
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
    """Return True for a directory. Raises ArgumentError for a broken link or one that forms a cycle."""
    suffix = os.path.splitext(entry.name)[1].lower()
    wanted = not entry.name.startswith(".") and suffix in ("", ".tar")
    if entry.is_symlink() and wanted and not os.path.exists(entry.path):
        raise ArgumentError(f"{entry.path} is a broken link. Add its target, or remove the link.")
    if entry.is_symlink() and entry.is_dir():
        there = os.path.realpath(entry.path)
        if any(f"{path}/".startswith(f"{there}/") for path in above):
            raise ArgumentError(f"{entry.path} links to a directory above it. Remove the link.")
    return entry.is_dir() and not entry.name.startswith(".")


def _is_image(entry: os.DirEntry[str], left_out: LeftOut) -> bool:
    """Return True if a file is named like an image. Raises ArgumentError if it is not a regular file."""
    if not _is_named(entry.path, left_out):
        return False
    if not entry.is_file():
        raise ArgumentError(f"{entry.path} is named like an image, but is not a regular file. Remove it.")
    return True


def _is_named(path: str, left_out: LeftOut) -> bool:
    """Return True if a path has an image's suffix and is not hidden. Otherwise, record it as left out."""
    name = path.rpartition("/")[2]
    if _IMAGE.search(name) and not name.startswith("."):
        return True
    left_out["hidden" if name.startswith(".") else Path(name).suffix.lower() or "no ending"].append(path)
    return False


def _is_member(member: tarfile.TarInfo, left_out: LeftOut) -> bool:
    """Return True if a member of a tar is an image. Otherwise, record it as left out."""
    if not member.isfile() and not member.isdir():
        left_out["links"].append(member.name)
    return member.isfile() and _is_named(member.name, left_out)


def _in_tar(path: Path, left_out: LeftOut) -> Iterator[Found]:
    """Yield the images in an official tar by class, from its inner tars. Other images have no class."""

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
    """Open a tar. Raises ArgumentError if it turns out to be damaged or incomplete."""
    try:
        with tarfile.open(path, "r:") as tar:
            yield tar
            _check_end(tar)
    except tarfile.TarError as error:
        raise ArgumentError(f"{path} is damaged or incomplete: {error}. Copy it again.") from None


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise ReadError if data follows the last member. tarfile takes a damaged header for the end."""
    tar.getmembers()
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(
                f"data follows its end at byte {tar.offset}: it is damaged, or several tars were joined"
            )


def _members(tar: tarfile.TarFile, left_out: LeftOut) -> Iterator[tuple[str, int, int]]:
    for member in tar:
        if _is_member(member, left_out):
            yield member.name.removeprefix("./"), member.offset_data, member.size
