"""Check annotations in COCO's format and the images they are of; leave out what is broken, and list it."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringdance.data.files import write_whole
from ringdance.data.prepare.plan import check_broken, list_problems
from ringdance.data.prepare.progress import PrepareProgress, say
from ringdance.errors import ArgumentError
from ringdance.host.limits import usable_cores

Fields = dict[str, Any]


@dataclass
class Checked:
    """What is left of a split, and what is wrong with the rest: what it is, its number, and why."""

    table: Fields
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def fault(self, what: str, number: Any, why: str) -> None:
        """Note why something was left out."""
        self.problems.append((what, str(number), why))


def prepare(
    source: Path, destination: Path, splits: Sequence[str], max_broken: int | None
) -> int:
    """Write annotations without what is broken, with links to the images.

    Args:
        source: with ``annotations/instances_SPLIT.json`` and the images in ``SPLIT``.
        destination: gets the same.
        splits: all of the source, if there are none.
        max_broken: so much may be left out; None: a hundredth of a split's annotations.

    Returns:
        The number of images, annotations and categories that were left out.

    Raises:
        ArgumentError: a file is missing or no JSON, or more is broken.
    """
    found = sorted(one.stem.partition("_")[2] for one in source.glob("annotations/instances_*.json"))
    if not (splits := splits or found):
        raise ArgumentError(f"{source}: there is no annotations/instances_SPLIT.json: see --help")
    for one in (Path(), Path("annotations")):
        if (destination / one).resolve() == (source / one).resolve():
            raise ArgumentError(f"{destination / one} is SRC's: choose another DST; SRC stays as it is")
    (destination / "annotations").mkdir(parents=True, exist_ok=True)
    return sum(_split(source, destination, split, max_broken) for split in splits)


def _split(source: Path, destination: Path, split: str, max_broken: int | None) -> int:
    """Prepare one split; return what was left out."""
    name = Path("annotations") / f"instances_{split}.json"
    try:
        table = json.loads(_read(source / name))
    except OSError as error:
        raise ArgumentError(f"{source / name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{source / name} is no JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(table.get(one), list) for one in _ONE):
        raise ArgumentError(f"{source / name}: it must have lists of {', '.join(_ONE)}, as COCO's files do")
    total, checked = len(table["annotations"]), check(table, source / split)
    listed, left_out = destination / f"{split}.problems.tsv", len(checked.problems)
    list_problems(listed, checked.problems)
    what = f"{left_out} images, annotations and categories of {split}"
    check_broken(what, left_out, total, max_broken, listed)
    link, images, objects = destination / split, checked.table["images"], checked.table["annotations"]
    if link.exists() and not link.is_symlink():
        raise ArgumentError(f"{link} is not a link and may have other images: remove it or change DST")
    for one in (destination / name, link):  # of an earlier call, perhaps with other images
        one.unlink(missing_ok=True)
    link.symlink_to((source / split).resolve(), target_is_directory=True)
    write_whole(destination / name, json.dumps(checked.table).encode())  # last: it is what is trained on
    kinds = len(checked.table["categories"])
    say(f"{split}: {len(images)} images with {len(objects)} objects of {kinds} categories")
    return left_out


def _read(path: Path) -> bytes:
    """Return a file's bytes; raise OSError also for what would never end, such as a FIFO."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file")
    return path.read_bytes()


def check(table: Fields, directory: Path) -> Checked:
    """Return what is whole of a split, in the order of the numbers of images."""
    found = Checked({**table})
    kinds = {one["id"]: one for one in _unique(found, table, "categories")}
    images = {one["id"]: one for one in _unique(found, table, "images")}
    left = set[int]()
    with PrepareProgress(len(images), "images") as progress, ThreadPoolExecutor(usable_cores()) as pool:
        whys = pool.map(lambda one: _image_fault(one, directory), images.values())
        for number, why in zip([*images], whys, strict=True):
            progress.add(1, 1)
            if why:
                found.fault("image", number, why)
                left.add(number)
                del images[number]
    objects = []
    for one in _unique(found, table, "annotations"):
        if isinstance(number := one.get("image_id"), int) and number in left:
            continue  # with its image
        _drop_slivers(found, one)
        if why := _object_fault(one, images, kinds):
            found.fault("annotation", one["id"], why)
        else:
            objects.append(one)
    ordered = sorted(images.values(), key=lambda one: int(one["id"]))
    found.table |= {"images": ordered, "annotations": objects, "categories": [*kinds.values()]}
    return found


def _unique(found: Checked, table: Fields, part: str) -> Iterator[Fields]:
    """Yield the entries with a number that no earlier one has."""
    seen, what = set[int](), _ONE[part]
    for place, one in enumerate(table[part]):
        number = one.get("id") if isinstance(one, dict) else None
        if not isinstance(number, int) or number < 0:
            found.fault(what, f"entry {place}", "it has no id that is a number of 0 or more")
        elif number in seen:
            found.fault(what, number, f"entry {place} has the id of an earlier one")
        else:
            seen.add(number)
            yield one


_ONE = {"images": "image", "annotations": "annotation", "categories": "category"}


def _image_fault(one: Fields, directory: Path) -> str:
    """Return what is wrong with an image or its file, or ""."""
    from ringdance.data.images import decode  # here: a clear error where a package is missing

    if not isinstance(name := one.get("file_name"), str):
        return "it has no file_name"
    try:
        data = _read(directory / name)
    except (OSError, ValueError) as error:  # a name that no file can have
        return f"{name}: {getattr(error, 'strerror', error)}"
    try:
        height, width = decode(data).shape[:2]
    except Exception as error:  # Pillow's decoders raise many
        return f"{name} cannot be decoded: {error}"
    if (width, height) != (one.get("width"), one.get("height")):
        return f"{name} has {width} x {height} pixels, not {one.get('width')} x {one.get('height')}"
    return ""


def _object_fault(one: Fields, images: dict[int, Fields], kinds: dict[int, Fields]) -> str:
    """Return what is wrong with an annotation, or ""; what it lacks of an area is filled in."""
    for name, known in (("image_id", images), ("category_id", kinds)):
        if not isinstance(number := one.get(name), int) or number not in known:
            return f"unknown {name} {number}"
    box, about = one.get("bbox"), images[one["image_id"]]
    if not isinstance(box, list) or not _numbers(box, 4):
        return f"its bbox is not four numbers: {box}"
    left, top, wide, high = box
    if wide <= 0 or high <= 0:
        return f"its box has no area: {box}"
    # A pixel more is rounding: COCO's own boxes are of outlines between pixels.
    if min(left, top) < -1 or left + wide > about["width"] + 1 or top + high > about["height"] + 1:
        return f"its box {box} is outside of the image, {about['width']} x {about['height']}"
    if not _numbers([one.setdefault("area", wide * high)], 1):
        return f"its area is no number: {one['area']}"
    one["iscrowd"] = one.get("iscrowd") or 0
    if one["iscrowd"] not in (0, 1):
        return f"its iscrowd is neither 0 nor 1: {one['iscrowd']}"
    return _outline_fault(one["segmentation"], about) if "segmentation" in one else ""


def _drop_slivers(found: Checked, one: Fields) -> None:
    """Drop an empty outline, and of several polygons the ones with under three points, which are noted."""
    outline = one.get("segmentation")
    if outline is None or outline == []:
        one.pop("segmentation", None)
    elif isinstance(outline, list):
        whole = [part for part in outline if not isinstance(part, list) or len(part) >= 6]
        if whole and len(whole) < len(outline):
            one["segmentation"] = whole
            found.fault("polygon", one["id"], f"{len(outline) - len(whole)} of fewer than three points")


def _outline_fault(outline: Any, about: Fields) -> str:
    """Return what is wrong with polygons or run lengths, or ""."""
    if isinstance(outline, list):
        whole = bool(outline) and all(
            isinstance(one, list) and len(one) >= 6 and _numbers(one, len(one) // 2 * 2) for one in outline
        )
        if not whole:
            return "a polygon is not three or more pairs of numbers"
        far = 2 * max(about["width"], about["height"])  # to draw it would take its length of time and memory
        inside = all(abs(number) <= far for one in outline for number in one)
        return "" if inside else "a polygon is far outside of the image"
    size = [about["height"], about["width"]]
    if not isinstance(outline, dict) or outline.get("size") != size:
        return f"its segmentation is neither polygons nor run lengths of size {size}"
    counts: Any = outline.get("counts")
    try:
        lengths: Any = run_lengths(counts) if isinstance(counts, str) else counts
        whole = all(isinstance(one, int) and one >= 0 for one in lengths) and sum(lengths) == math.prod(size)
    except (TypeError, IndexError):
        whole = False
    return "" if whole else f"its run lengths are not of {math.prod(size)} pixels"


def run_lengths(text: str) -> list[int]:
    """Return the run lengths that COCO's compressed text says: 5 bits a character, lowest first.

    From the fourth on a number is the difference to the one two before.

    Raises:
        IndexError: the text ends within a number.
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


_LARGEST = 1e15  # of a number that means something here; NaN is not below it


def _numbers(values: Any, count: int) -> bool:
    """Whether something is a list of so many numbers, none of them NaN or huge."""
    return (
        isinstance(values, list) and len(values) == count
        and all(isinstance(one, int | float) and abs(one) < _LARGEST for one in values)
    )  # fmt: skip
