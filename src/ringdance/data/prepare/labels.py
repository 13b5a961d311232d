"""Labels of ImageNet's validation images, which lie in no class directories, and what classes are called."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ringdance.data.files import needed
from ringdance.errors import ArgumentError

_DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_LABELS = (
    "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "val.txt",
    _DEVKIT,
)  # fmt: skip
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_ANNOTATIONS = "Annotations/CLS-LOC/val"
_TEXTS = ("LOC_synset_mapping.txt", "synset_words.txt", "imagenet_metadata.txt")
_SYNSET = re.compile(r"n\d{8}")


def class_texts(source: Path) -> dict[str, str]:
    """Return what classes are called, by directory, from a file beside the images that says it."""
    for directory in _around(source):
        for name in _TEXTS:
            if (path := directory / name).is_file():
                pairs = (line.split(None, 1) for line in path.read_text().splitlines())
                return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}
    return {}


def validation_labels(
    source: Path, place: Path, images: Sequence[str], classes: Sequence[str], given: Path | None
) -> dict[str, str]:
    """Return the class directory of each image of `images`, which are sorted.

    Args:
        source: where to look for labels, with the directories above it that belong to ImageNet.
        place: of the images, for errors.
        images: names of files.
        classes: all directories, if they are known: by them numbers in a file are read.
        given: the file, instead of looking for one.

    Raises:
        ArgumentError: there is no file with labels, or it does not fit the images.
    """
    found = given or next(_candidates(source), None)
    if found is None:
        raise ArgumentError(
            f"{place} has images outside of class directories, and no labels for them. Looked for "
            f"{', '.join(_LABELS)} and {_ANNOTATIONS} in {source} and above; --labels FILE names another file"
        )
    if not found.exists():
        raise ArgumentError(f"--labels {found}: no such file")
    if found.is_dir():
        labels = {name: _of_annotation(found / f"{Path(name).stem}.xml") for name in images}
    elif found.name.endswith((".tar.gz", ".tgz")):
        labels = _in_order(found, _of_devkit(found), images)
    else:
        labels = _of_text(found, images, classes)
    missing = [name for name in images if name not in labels]
    if missing:
        raise ArgumentError(f"{found}: no label of {missing[0]} and {len(missing) - 1} more of {place}")
    return labels


def _around(source: Path) -> Iterator[Path]:
    """Iterate over directories that may have files about the images: of Kaggle's archive and of others."""
    base = source.absolute()
    yield base
    yield from (path for name in ("ILSVRC", "devkit", "data") if (path := base / name).is_dir())
    for parent in list(base.parents)[:3]:
        if base.name not in ("CLS-LOC", "Data", "ILSVRC", "train", "val"):
            return
        yield parent
        base = parent


def _candidates(source: Path) -> Iterator[Path]:
    for directory in _around(source):
        yield from (path for name in (*_LABELS, _ANNOTATIONS) if (path := directory / name).exists())


def _of_text(path: Path, images: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Read lines of a class each, or of an image and its class or number; commas or spaces between them."""
    rows = [re.split(r"[,\s]+", line.strip()) for line in path.read_text().splitlines() if line.strip()]
    if rows and rows[0][0] == "ImageId":
        del rows[0]
    if any(len(row) == 1 for row in rows):
        if not all(_SYNSET.fullmatch(row[0]) or row[0] in classes for row in rows):
            raise ArgumentError(
                f"{path}: its lines are not names of classes such as n01440764. The numbers of {_TRUTH} are "
                f"no labels: give {_DEVKIT}, which explains them"
            )
        return _in_order(path, [row[0] for row in rows], images)
    by_stem = {Path(row[0]).stem: row[1] for row in rows}
    if any(value.isdecimal() for value in by_stem.values()):
        if not classes or max(int(value) for value in by_stem.values()) >= len(classes):
            raise ArgumentError(f"{path}: its numbers need the classes of train, which SRC must have too")
        by_stem = {stem: classes[int(value)] for stem, value in by_stem.items()}
    return {name: by_stem[stem] for name in images if (stem := Path(name).stem) in by_stem}


def _in_order(path: Path, labels: Sequence[str], images: Sequence[str]) -> dict[str, str]:
    if len(labels) != len(images):
        raise ArgumentError(f"{path}: it has {len(labels)} labels, but there are {len(images)} images")
    return dict(zip(images, labels, strict=True))


def _of_annotation(path: Path) -> str:
    try:
        return ElementTree.parse(path).findtext("object/name") or ""
    except (OSError, ElementTree.ParseError) as error:
        raise ArgumentError(f"{path}: {error}") from None


def _of_devkit(path: Path) -> list[str]:
    """Return the classes of the validation images in their order, by the official development kit."""
    try:
        loadmat = needed("scipy.io").loadmat
    except ArgumentError:
        raise ArgumentError(
            f"{path}: reading its meta.mat needs SciPy: pip install scipy; or put one of "
            f"{', '.join(_LABELS[:3])} beside it"
        ) from None
    contents = {}
    with tarfile.open(path) as tar:
        for member in tar:
            name = Path(member.name).name
            if name in ("meta.mat", _TRUTH) and (file := tar.extractfile(member)):
                contents[name] = file.read()
    if len(contents) < 2:
        raise ArgumentError(f"{path}: no meta.mat and {_TRUTH} in it")
    synsets = loadmat(io.BytesIO(contents["meta.mat"]), squeeze_me=True)["synsets"]
    by_id = {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in synsets if int(one["num_children"]) == 0}
    return [by_id[int(number)] for number in contents[_TRUTH].split()]
