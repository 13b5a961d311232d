"""``ringdance data index``: index TFRecord and tar files that other tools have written."""

from __future__ import annotations

import argparse
import json
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from ringdance.data import tfrecord
from ringdance.data.dataset import ROW, Dataset, ShardFile, joined
from ringdance.data.files import file_crc32c
from ringdance.data.index import is_index
from ringdance.data.prepare.plan import list_problems
from ringdance.data.prepare.progress import amount, counted, say
from ringdance.data.prepare.sources import open_tar
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores

# Suffixes of images in tars. If several images of a sample differ only in the suffix, the one listed first
# is used, because the others are often masks or previews.
_ENDINGS = ("image", "jpg", "jpeg", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif")
_IMAGES = ("image/encoded", "image", "image_raw", *_ENDINGS[1:])
_LABELS = ("image/class/label", "label", "class", "cls")
_SYNSET = "image/class/synset"
_SPLIT = re.compile(r"train|val|test", re.IGNORECASE)
_OWN = (".json", ".npy", ".problems.tsv")
_SHARD = re.compile(r"\.(tar|tgz|tfrecords?|tfrec|record)\b|-\d+-of-\d+$", re.IGNORECASE)
_MOST_CLASSES = 1 << 24


@dataclass
class _Scanned:
    """The samples found in a TFRecord or tar file.

    Attributes:
        path: Path of the file.
        rows: For each image: file number (always 0), length, offset, and label as in the file.
        synsets: Directory name of each label's class, such as "n01440764", if stored in the file.
        from_one: True if all labels are features of TensorFlow's ImageNet scripts, which start at 1.
        left_out: Name of each sample that was left out, and the reason.
    """

    path: Path
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    synsets: dict[int, str] = field(default_factory=dict)
    from_one: bool = False
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, place: tuple[int, int], label: object) -> bool:
        """Add an image, given its (offset, size) in the file. Returns False if it is left out."""
        number = _class(label)
        if number is None:
            # The label is part of the name, not of the reason, because samples are counted by reason.
            why = f"the label is not a whole number from 0 to {_MOST_CLASSES - 1}"
            self.left_out.append((f"{name}, label {label!r:.40}", why))
        elif not place[1]:
            self.left_out.append((name, "the image is empty"))
        else:
            self.rows.append((0, place[1], place[0], number))
            return True
        return False


def _class(label: object) -> int | None:
    """Convert a label to a class number. Returns None if the label is not valid."""
    try:
        number = int(label) if isinstance(label, str | bytes) else label
    except ValueError:
        return None
    right = isinstance(number, int | float) and 0 <= number < _MOST_CLASSES and number % 1 == 0
    return int(number) if right else None  # type: ignore[call-overload]


def index(given: argparse.Namespace) -> int:
    """Index the TFRecords or tars in a directory. Returns how many samples were left out.

    Args:
        given: Command-line options.

    Raises:
        ArgumentError: No samples are found, a file is damaged, or a split has both TFRecords and tars.
    """
    directory: Path = given.directory
    groups: dict[str, list[Path]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for path, kind in _files(directory, given.files):
        name = given.split or _split(path.relative_to(directory))
        groups[name].append(path)
        if kinds.setdefault(name, kind) != kind:
            raise ArgumentError(
                f"{directory} has both TFRecords and tars. Choose one kind, as with --files '*.tar'."
            )
    with ThreadPoolExecutor(usable_cores()) as pool:
        scanned = {name: list(pool.map(_SCANS[kinds[name]], paths)) for name, paths in groups.items()}
    for name, files in scanned.items():
        if not any(file.rows for file in files):
            notes = (f"{file.path}: {what}: {why}" for file in files for what, why in file.left_out)
            raise ArgumentError(f"{directory}: no samples of {name}. {next(notes, 'All files are empty.')}")
    every = [file for files in scanned.values() for file in files]
    lowest = min(row[3] for file in every for row in file.rows)
    detected = int(lowest > 0 and all(file.from_one for file in every))
    first = detected if given.first_label is None else given.first_label
    if lowest < first:
        raise ArgumentError(f"{directory} has the label {lowest}, but --first-label is {first}. Omit it.")
    synsets = {label - first: name for file in every for label, name in file.synsets.items()}
    classes = max(row[3] for file in every for row in file.rows) - first + 1
    names = [synsets.get(label, str(label)) for label in range(classes)]
    left_out = sum(
        _write(directory, name, kinds[name], files, first, names) for name, files in scanned.items()
    )
    hint = " (to override this, use --first-label)" if given.first_label is None else ""
    print(f"labels in the files start at {first}{hint}")
    return left_out


def _files(directory: Path, pattern: str) -> list[tuple[Path, str]]:
    """List the TFRecords and tars with their formats. Prints the names of other files.

    Raises:
        ArgumentError: No TFRecords or tars are found, or a file with the name of one is neither.
    """
    own = {f"{one.stem}{end}" for one in directory.glob("*.json") if is_index(one) for end in _OWN}
    shards, others = [], []
    try:
        paths = sorted(path for path in directory.glob(pattern) if path.name not in {*own, ".prepare"})
    except (NotImplementedError, ValueError) as error:
        raise ArgumentError(
            f"--files {pattern!r}: {error}. Use a pattern that is relative to {directory}."
        ) from None
    for path in paths:
        if kind := _format(path):
            shards.append((path, kind))
        elif path.is_dir() or path.name.startswith(".") or not _SHARD.search(path.name):
            others.append(f"{path.relative_to(directory)}{'/' * path.is_dir()}")
        else:
            raise ArgumentError(
                f"{path} has the name of a TFRecord or tar file, but is neither. It may be damaged, empty, "
                "compressed or a broken link. Copy it again, decompress it, or exclude it with --files."
            )
    if others:
        say(f"not read, because they are neither TFRecords nor tars: {counted(others)}")
    if not shards:
        raise ArgumentError(f"{directory} contains no TFRecords or tars that match {pattern!r}.")
    return shards


def _format(path: Path) -> str:
    """Return a file's format, or an empty string if it is neither a TFRecord file nor a tar."""
    if path.name.startswith(".") or not path.is_file():
        return ""
    with open(path, "rb") as file:
        if tfrecord.is_head(file.read(12)):
            return "tfrecord"
    if path.suffix.lower() == ".tar":
        with suppress(tarfile.TarError), tarfile.open(path, "r:"):
            return "webdataset"
    return ""


def _split(path: Path) -> str:
    match = _SPLIT.search(path.name) or _SPLIT.search(str(path))
    name = match[0].lower() if match else "train"
    return {"val": "validation"}.get(name, name)


def _scan_tfrecord(path: Path) -> _Scanned:
    """Collect the locations and labels of the images in a TFRecord file."""
    scanned = _Scanned(path, from_one=True)
    with open(path, "rb") as file:
        for begin, head, data, _ in tfrecord.records(file):
            name = f"record at byte {begin}"
            try:
                features = tfrecord.parse(data)
            except ArgumentError as error:
                scanned.left_out.append((name, str(error)))
                continue
            image = next((features[key] for key in _IMAGES if key in features), (None, 0))
            key = next((key for key in _LABELS if key in features), "")
            if not isinstance(image[0], bytes) or not key:
                name = f"{name}, with the features {', '.join(sorted(features)) or 'none'}"
                expected = f"no image ({', '.join(_IMAGES[:2])}) or no label ({', '.join(_LABELS[:2])})"
                scanned.left_out.append((name, expected))
                continue
            place, label = (begin + len(head) + image[1], len(image[0])), features[key][0]
            if not scanned.add(name, place, label):
                continue
            scanned.from_one &= key == _LABELS[0]
            synset = features.get(_SYNSET, (b"", 0))[0]
            if isinstance(synset, bytes) and (text := synset.decode(errors="replace").replace("\0", "")):
                scanned.synsets[scanned.rows[-1][3]] = text
    return scanned


def _scan_tar(path: Path) -> _Scanned:
    """Collect the locations and labels of the images in a tar.

    As in WebDataset, a sample consists of adjacent members whose names are equal up to the first dot in the
    last path component.
    """
    scanned = _Scanned(path)

    def key(member: tarfile.TarInfo) -> str:
        directory, _, name = member.name.rpartition("/")
        return f"{directory}/{name.partition('.')[0]}"

    with open_tar(path) as tar:
        members = (one for one in tar if not (one.isdir() or one.name.rpartition("/")[2].startswith(".")))
        for _, group in groupby(members, key):
            images, labels, first = dict[str, tarfile.TarInfo](), list[object](), ""
            for member in group:
                ending, first = member.name.rpartition("/")[2].partition(".")[2].lower(), first or member.name
                if ending in images:  # a repeated name starts another sample
                    _add_sample(scanned, first, images, labels)
                    images, labels, first = {}, [], member.name
                if not member.isreg() or member.issparse():
                    scanned.left_out.append((member.name, "a link, or not a regular file"))
                elif ending in ("cls", "json") and (file := tar.extractfile(member)):
                    labels.append(_label(file.read()))
                elif ending in _ENDINGS:
                    images[ending] = member
            _add_sample(scanned, first, images, labels)
    return scanned


def _add_sample(
    scanned: _Scanned, name: str, images: Mapping[str, tarfile.TarInfo], labels: Sequence[object]
) -> None:
    """Add a sample, or record why it is left out."""
    image = next((images[ending] for ending in _ENDINGS if ending in images), None)
    if image is None or not labels:
        scanned.left_out.append((name, f"no {'.cls or .json' if image else 'image'} with this name"))
        return
    label = next((label for label in labels if _class(label) is not None), labels[0])
    scanned.add(image.name, (image.offset_data, image.size), label)


def _label(data: bytes) -> object:
    """Return the label in the contents of a .cls or .json file."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(value, dict):
        return value
    return next((value[name] for name in _LABELS if value.get(name) is not None), None)


_SCANS = {"tfrecord": _scan_tfrecord, "webdataset": _scan_tar}


def _write(
    directory: Path, split: str, kind: str, files: Sequence[_Scanned], first: int, classes: Sequence[str]
) -> int:
    """Write a split's index, and list the samples that were left out. Returns their number."""
    parts, shards = [], []
    for file in files:
        rows = np.array(file.rows, ROW)
        rows["label"] -= first
        parts.append(rows)
        size, name = file.path.stat().st_size, str(file.path.relative_to(directory))
        shards.append(ShardFile(name, len(rows), size, file_crc32c(file.path)))
    Dataset(directory, split, kind, classes, shards, joined(parts)).write()
    print(f"{split}: {amount(sum(map(len, parts)), 'sample')} in {amount(len(files), 'file')} ({kind})")
    left_out = [(file.path.name, name, why) for file in files for name, why in file.left_out]
    list_problems(listed := directory / f"{split}.problems.tsv", left_out)
    for why, count in Counter(why for _, _, why in left_out).items():
        say(f"{split}: left out {amount(count, 'sample')}: {why}. {listed} lists all.")
    return len(left_out)
