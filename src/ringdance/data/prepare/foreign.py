"""``ringdance data index``: an index of TFRecords and tars that others have written."""

from __future__ import annotations

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ringdance.data import tfrecord
from ringdance.data.dataset import ROW, Dataset, ShardFile, joined
from ringdance.data.files import file_crc32c
from ringdance.errors import ArgumentError
from ringdance.launch.system.linux import usable_cores

_IMAGES = ("image/encoded", "image", "image_raw", "jpg", "jpeg", "png")
_LABELS = ("image/class/label", "label", "class", "cls")
_SYNSET = "image/class/synset"
_SPLIT = re.compile(r"train|val|test")


@dataclass
class _Scanned:
    """What a file holds.

    Attributes:
        path: of it.
        rows: number 0, length and offset of the image, label as in the file.
        synsets: the classes' directories by label, where the file says them.
        from_one: whether labels are those of TensorFlow's scripts, which keep 0 free.
    """

    path: Path
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    synsets: dict[int, str] = field(default_factory=dict)
    from_one: bool = False


def index(directory: Path, split: str = "", pattern: str = "*", first_label: int | None = None) -> int:
    """Index the files of a directory, which stay as they are; return the exit code.

    Args:
        directory: of the files.
        split: name of the split of all files, or "" for that of each file's name.
        pattern: of the files' names.
        first_label: number that they give the first class; None: found out.

    Raises:
        ArgumentError: there are no such files, or one cannot be understood.
    """
    groups: dict[str, list[Path]] = defaultdict(list)
    kinds: dict[str, str] = {}
    for path in sorted(directory.glob(pattern)):
        if path.is_file() and not path.name.startswith(".") and (kind := _format(path)):
            name = split or _split(path)
            groups[name].append(path)
            if kinds.setdefault(name, kind) != kind:
                raise ArgumentError(f"{directory} has TFRecords and tars: choose, as by --files '*.tar'")
    if not groups:
        raise ArgumentError(f"{directory}: no TFRecords or tars match {pattern!r}")
    with ThreadPoolExecutor(usable_cores()) as pool:
        scanned = {name: list(pool.map(SCANS[kinds[name]], paths)) for name, paths in groups.items()}
    every = [one for files in scanned.values() for one in files]
    lowest = min((row[3] for one in every for row in one.rows), default=0)
    first = first_label if first_label is not None else int(lowest > 0 and all(one.from_one for one in every))
    if lowest < first:
        raise ArgumentError(f"{directory}: a label is {lowest}, so that of the first class is not {first}")
    synsets = {label - first: name for one in every for label, name in one.synsets.items()}
    classes = max(row[3] for one in every for row in one.rows) - first + 1
    names = [synsets.get(label, str(label)) for label in range(classes)]
    for name, files in scanned.items():
        _write(directory, name, kinds[name], files, first, names)
    print(f"labels in the files begin with {first}" + ("" if first_label is not None else " (--first-label)"))
    return 0


def _format(path: Path) -> str:
    """Return the format of a file by its first bytes, "" if it is neither."""
    with open(path, "rb") as file:
        head = file.read(12)
    if tfrecord.is_head(head):
        return "tfrecord"
    return "webdataset" if path.suffix == ".tar" and tarfile.is_tarfile(path) else ""


def _split(path: Path) -> str:
    found = _SPLIT.search(path.name)
    return {"val": "validation"}.get(found[0], found[0]) if found else "train"


def _scan_tfrecord(path: Path) -> _Scanned:
    """Read all records of a file; of each, the image's place and the label."""
    scanned = _Scanned(path, from_one=True)
    with open(path, "rb") as file:
        for begin, head, data, _ in tfrecord.records(file):
            found = tfrecord.parse(data)
            image = next((found[name] for name in _IMAGES if name in found), None)
            key = next((name for name in _LABELS if name in found), "")
            label = found[key][0] if key else None
            if image is None or not isinstance(image[0], bytes) or not isinstance(label, int):
                raise ArgumentError(
                    f"{path}: the record at byte {begin} has no image ({', '.join(_IMAGES[:2])}) or no "
                    f"label ({', '.join(_LABELS[:2])}); its features: {', '.join(sorted(found)) or 'none'}"
                )
            scanned.from_one &= key == _LABELS[0]
            scanned.rows.append((0, len(image[0]), begin + len(head) + image[1], label))
            synset = found.get(_SYNSET, (b"", 0))[0]
            if isinstance(synset, bytes) and (name := synset.decode(errors="replace").replace("\0", "")):
                scanned.synsets[label] = name
    return scanned


def _scan_tar(path: Path) -> _Scanned:
    """Read a tar's headers and labels; members of a sample have names that differ after the first dot."""
    scanned = _Scanned(path)
    places: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                directory, slash, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                key = directory + slash + key
                if ending.lower() in _IMAGES:
                    places[key] = member.offset_data, member.size
                elif ending in ("cls", "json") and (content := tar.extractfile(member)):
                    value = json.loads(content.read())
                    value = value if isinstance(value, int) else next(value[k] for k in _LABELS if k in value)
                    labels.setdefault(key, int(value))
    except (tarfile.TarError, ValueError, StopIteration) as error:
        raise ArgumentError(f"{path}: {error or 'a .json without label'}") from None
    if missing := places.keys() - labels.keys():
        raise ArgumentError(f"{path}: {len(missing)} images without .cls or .json, such as {min(missing)}")
    scanned.rows = [(0, size, offset, labels[key]) for key, (offset, size) in places.items()]
    return scanned


SCANS = {"tfrecord": _scan_tfrecord, "webdataset": _scan_tar}
"""For each format what reads the places and labels of all images of a file."""


def _write(
    directory: Path, split: str, kind: str, files: Sequence[_Scanned], first: int, classes: Sequence[str]
) -> None:
    parts, shards = [], []
    for one in files:
        rows = np.array(one.rows, ROW)
        rows["label"] -= first
        parts.append(rows)
        size = one.path.stat().st_size
        shards.append(ShardFile(one.path.name, len(rows), size, file_crc32c(one.path)))
    Dataset(directory, split, kind, classes, shards, joined(parts), first).write()
    print(f"{split}: {sum(map(len, parts))} samples in {len(files)} files ({kind})")
