"""``ringdance data prepare coco``: check annotations and images, and leave out broken entries."""

from __future__ import annotations

import argparse
import errno
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ringdance.data.files import write_whole
from ringdance.data.prepare.plan import check_broken, list_problems
from ringdance.data.prepare.progress import PrepareProgress, amount, say
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores

Fields = dict[str, Any]


Problems = list[tuple[str, str, str]]
"""Entries that were left out: kind of entry, number, and reason."""


def prepare(given: argparse.Namespace) -> int:
    """Write annotation files without the broken entries, and symlink the image directories.

    Args:
        given: Command-line options. ``source`` and ``destination`` are absolute paths.

    Returns:
        The total number of images, annotations and categories that were left out.

    Raises:
        ArgumentError: A file is missing or not JSON, or too many entries are broken.
    """
    source: Path = given.source
    destination: Path = given.destination
    available = sorted(part.stem.partition("_")[2] for part in source.glob("annotations/instances_*.json"))
    if not (splits := given.split or available):
        raise ArgumentError(f"{source} has no annotations/instances_SPLIT.json. See --help for the layout.")
    for part in (Path(), Path("annotations")):
        if (destination / part).resolve() == (source / part).resolve():
            raise ArgumentError(f"{destination / part} is in SRC, which must not change. Choose another DST.")
    (destination / "annotations").mkdir(parents=True, exist_ok=True)
    return sum(_split(source, destination, split, given.max_broken) for split in splits)


def _split(source: Path, destination: Path, split: str, max_broken: int | None) -> int:
    """Prepare one split. Returns the number of entries left out."""
    name = Path("annotations") / f"instances_{split}.json"
    try:
        table = json.loads(_read(source / name))
    except OSError as error:
        raise ArgumentError(f"{source / name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{source / name} is not JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(table.get(part), list) for part in _ONE):
        raise ArgumentError(f"{source / name} must be an object with lists of {', '.join(_ONE)}.")
    total = len(table["annotations"])
    problems = check(table, source / split)
    listed, left_out = destination / f"{split}.problems.tsv", len(problems)
    list_problems(listed, problems)
    what = f"{amount(left_out, 'entry', 'entries')} in {split}"
    check_broken(what, left_out, total, max_broken, listed)
    link = destination / split
    if link.exists() and not link.is_symlink():
        raise ArgumentError(
            f"{link} is not a link and may contain other images. Remove it or choose another DST."
        )
    for path in (destination / name, link):  # remove the results of an earlier run
        path.unlink(missing_ok=True)
    link.symlink_to((source / split).resolve(), target_is_directory=True)
    write_whole(destination / name, json.dumps(table).encode())  # last, so that training also finds the link
    images = amount(len(table["images"]), "image")
    objects = amount(len(table["annotations"]), "object")
    say(f"{split}: {images} with {objects} of {amount(len(table['categories']), 'category', 'categories')}")
    return left_out


def _read(path: Path) -> bytes:
    """Return a file's bytes. Raises OSError if it is not a regular file, because a FIFO could block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return path.read_bytes()


def check(table: Fields, directory: Path) -> Problems:
    """Remove broken entries from a split's annotations, and sort its images by id. Returns the problems."""
    problems: Problems = []
    kinds = {entry["id"]: entry for entry in _unique(problems, table, "categories")}
    images = {entry["id"]: entry for entry in _unique(problems, table, "images")}
    left = set[int]()
    with PrepareProgress(len(images), "images") as progress, ThreadPoolExecutor(usable_cores()) as pool:
        whys = pool.map(lambda entry: _image_fault(entry, directory), images.values())
        for number, why in zip([*images], whys, strict=True):
            progress.add(1, 1)
            if why:
                problems.append(("image", str(number), why))
                left.add(number)
                del images[number]
    objects = []
    for entry in _unique(problems, table, "annotations"):
        if isinstance(number := entry.get("image_id"), int) and number in left:
            continue  # not a problem, because its image was left out
        _drop_slivers(problems, entry)
        if why := _object_fault(entry, images, kinds):
            problems.append(("annotation", str(entry["id"]), why))
        else:
            objects.append(entry)
    ordered = sorted(images.values(), key=lambda entry: int(entry["id"]))
    table |= {"images": ordered, "annotations": objects, "categories": [*kinds.values()]}
    return problems


def _unique(problems: Problems, table: Fields, part: str) -> Iterator[Fields]:
    """Yield the entries whose id is valid and unique. Record the others as problems."""
    seen, what = set[int](), _ONE[part]
    for place, entry in enumerate(table[part]):
        number = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(number, int) or number < 0:
            problems.append((what, f"entry {place}", "its id is not a non-negative integer"))
        elif number in seen:
            problems.append((what, str(number), f"entry {place} repeats the id of an earlier {what}"))
        else:
            seen.add(number)
            yield entry


_ONE = {"images": "image", "annotations": "annotation", "categories": "category"}


def _image_fault(one: Fields, directory: Path) -> str:
    """Describe what is wrong with an image's entry or file. Returns an empty string if nothing is."""
    from ringdance.data.images import decode  # imported here so that a missing package gives a clear error

    if not isinstance(name := one.get("file_name"), str):
        return "it has no file_name"
    try:
        data = _read(directory / name)
    except (OSError, ValueError) as error:  # ValueError: the name contains a null byte
        return f"{name}: {getattr(error, 'strerror', error)}"
    try:
        height, width = decode(data).shape[:2]
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions
        return f"{name} cannot be decoded: {error}"
    if (width, height) != (one.get("width"), one.get("height")):
        return f"{name} has {width} x {height} pixels instead of {one.get('width')} x {one.get('height')}"
    return ""


def _object_fault(one: Fields, images: dict[int, Fields], kinds: dict[int, Fields]) -> str:
    """Describe what is wrong with an annotation, or return an empty string. Sets a missing area."""
    for name, known in (("image_id", images), ("category_id", kinds)):
        if not isinstance(number := one.get(name), int) or number not in known:
            return f"unknown {name} {number}"
    box, about = one.get("bbox"), images[one["image_id"]]
    if not isinstance(box, list) or not _numbers(box, 4):
        return f"its bbox is not four numbers: {box}"
    left, top, wide, high = box
    if wide <= 0 or high <= 0:
        return f"its box has no area: {box}"
    # Tolerate one pixel of rounding, because COCO's boxes are computed from outlines at subpixel precision.
    if min(left, top) < -1 or left + wide > about["width"] + 1 or top + high > about["height"] + 1:
        return f"its box {box} is outside the image, {about['width']} x {about['height']}"
    if not _numbers([one.setdefault("area", wide * high)], 1):
        return f"its area is not a number: {one['area']}"
    one["iscrowd"] = one.get("iscrowd") or 0
    if one["iscrowd"] not in (0, 1):
        return f"its iscrowd is neither 0 nor 1: {one['iscrowd']}"
    return _outline_fault(one["segmentation"], about) if "segmentation" in one else ""


def _drop_slivers(problems: Problems, one: Fields) -> None:
    """Remove an empty outline, or polygons with fewer than three points unless none would be left."""
    outline = one.get("segmentation")
    if outline is None or outline == []:
        one.pop("segmentation", None)
    elif isinstance(outline, list):
        whole = [part for part in outline if not isinstance(part, list) or len(part) >= 6]
        if whole and len(whole) < len(outline):
            one["segmentation"] = whole
            dropped = f"{len(outline) - len(whole)} with fewer than three points"
            problems.append(("polygon", str(one["id"]), dropped))


def _outline_fault(outline: Any, about: Fields) -> str:
    """Describe what is wrong with polygons or run lengths. Returns an empty string if nothing is."""
    if isinstance(outline, list):
        whole = bool(outline) and all(
            isinstance(one, list) and len(one) >= 6 and _numbers(one, len(one) // 2 * 2) for one in outline
        )
        if not whole:
            return "a polygon is not three or more pairs of numbers"
        far = 2 * max(about["width"], about["height"])  # rasterizing takes time and memory for each pixel
        inside = all(abs(number) <= far for polygon in outline for number in polygon)
        return "" if inside else "a polygon is far outside the image"
    size = [about["height"], about["width"]]
    if not isinstance(outline, dict) or outline.get("size") != size:
        return f"its segmentation is neither polygons nor run lengths of size {size}"
    counts: Any = outline.get("counts")
    try:
        lengths: Any = run_lengths(counts) if isinstance(counts, str) else counts
        whole = all(isinstance(run, int) and run >= 0 for run in lengths) and sum(lengths) == math.prod(size)
    except (TypeError, IndexError):
        whole = False
    return "" if whole else f"its run lengths do not add up to {math.prod(size)} pixels"


def run_lengths(text: str) -> list[int]:
    """Decode COCO's compressed run lengths: 5 bits per character, lowest bits first.

    From the fourth on, each run length is stored as the difference from the one two places before.

    Raises:
        IndexError: The text ends within a number.
    """
    lengths: list[int] = []
    place = 0
    while place < len(text):
        value = shift = 0
        while True:
            bits = ord(text[place]) - 48
            value |= (bits & 31) << shift
            place, shift = place + 1, shift + 5
            if not bits & 32:
                break
        if bits & 16:
            value -= 1 << shift
        lengths.append(value + lengths[-2] if len(lengths) > 2 else value)
    return lengths


_LARGEST = 1e15  # maximum coordinate or area; comparing with it also rejects NaN


def _numbers(values: Any, count: int) -> bool:
    """Return True if ``values`` is a list of ``count`` numbers whose magnitude is below ``_LARGEST``."""
    return (
        isinstance(values, list) and len(values) == count
        and all(isinstance(value, int | float) and abs(value) < _LARGEST for value in values)
    )  # fmt: skip
