"""Find the labels of validation images that are not in class directories, as in ImageNet's archive."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringdance.data.prepare.progress import amount
from ringdance.errors import ArgumentError

_LABELS = (
    "LOC_val_solution.csv", "imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "val.txt",
)  # fmt: skip
_SYNSET = re.compile(r"n\d{8}")


def validation_labels(
    source: Path, place: Path, images: Sequence[str], classes: Sequence[str], given: Path | None
) -> dict[str, str]:
    """Return the class directory of each image.

    Args:
        source: Directory in which to look for a label file. If it is part of Kaggle's layout, its parents are
            searched, too.
        place: Directory or tar that contains the images, for error messages.
        images: Sorted file names.
        classes: All class directories, or empty if unknown. Required for a file with class numbers.
        given: The label file to use, or None to look for one.

    Raises:
        ArgumentError: No label file is found, or it does not match the images.
    """
    candidates = (path for base in _around(source) for name in _LABELS if (path := base / name).exists())
    label_file = given or next(candidates, None)
    if label_file is None:
        raise ArgumentError(
            f"{place} has images outside of class directories, and no label file was found. Looked for "
            f"{', '.join(_LABELS)} in {source} and above. Add one of them, or pass --labels FILE."
        )
    labels = _of_text(label_file, images, classes)
    missing = [name for name in images if name not in labels]
    if missing:
        count = amount(len(missing), "image")
        raise ArgumentError(f"{label_file} has no labels for {count} in {place}, such as {missing[0]}.")
    return labels


def _around(source: Path) -> Iterator[Path]:
    """Yield the directories to search for label files. Kaggle's archive has them above the images."""
    base = source.absolute()
    yield base
    yield base / "ILSVRC"
    for parent in list(base.parents)[:3]:
        if base.name not in ("CLS-LOC", "Data", "ILSVRC", "train", "val"):
            return
        yield parent
        base = parent


def _of_text(path: Path, images: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Read a label file: each line has a class, or an image and its class or class number."""
    lines = path.read_text(errors="replace").splitlines()
    rows = [re.split(r"[,\s]+", line.strip()) for line in lines if line.strip()]
    if rows and rows[0][0] == "ImageId":
        del rows[0]
    if any(len(row) == 1 for row in rows):
        if not all(_SYNSET.fullmatch(row[0]) or row[0] in classes for row in rows):
            raise ArgumentError(
                f"{path} has lines that are not class names such as n01440764. If it comes from ImageNet's "
                f"development kit, its numbers do not match the labels here. Use {_LABELS[1]} instead."
            )
        if len(rows) != len(images):
            raise ArgumentError(f"{path} has {len(rows)} labels, but there are {len(images)} images.")
        return dict(zip(images, (row[0] for row in rows), strict=True))
    by_stem = {Path(row[0]).stem: row[1] for row in rows}
    if any(value.isdecimal() for value in by_stem.values()):
        if not classes or max(int(value) for value in by_stem.values()) >= len(classes):
            raise ArgumentError(f"{path} has class numbers, but SRC has no train split with these classes.")
        by_stem = {stem: classes[int(value)] for stem, value in by_stem.items()}
    return {name: by_stem[stem] for name in images if (stem := Path(name).stem) in by_stem}
