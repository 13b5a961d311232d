"""``ringdance data prepare imagenet``: find images, write them in several processes, and index them."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from rich.filesize import decimal

from ringdance.data.dataset import Dataset, ShardFile
from ringdance.data.files import needed
from ringdance.data.index import damaged
from ringdance.data.prepare import plan as plans
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.data.prepare.plan import SplitPlan
from ringdance.data.prepare.progress import PrepareProgress, amount, counted, say
from ringdance.data.prepare.sources import Source, find
from ringdance.data.prepare.work import run_tasks
from ringdance.data.sample import Sample
from ringdance.data.tables.table import TableFile
from ringdance.data.writing import write_shard
from ringdance.errors import ArgumentError

_FILE_SIZE = 128 << 20
"""Target file size if --shards is not given."""


def prepare(given: argparse.Namespace) -> int:
    """Write a data set, or resume an earlier run. Returns the number of images left out.

    Args:
        given: Command-line options. ``source`` and ``destination`` are absolute paths.

    Raises:
        ArgumentError: The data set cannot be prepared. The message says what to do.
    """
    for module in ("google_crc32c", "PIL", "simplejpeg"):
        needed(module)
    destination: Path = given.destination
    say(f"Looking for images in {given.source}")
    sources = find(given.source, given.split, given.labels)
    for part in sources:
        if part.left_out:
            what = "; ".join(f"{ending}: {counted(names)}" for ending, names in part.left_out.items())
            say(f"{part.split}: left out, because they are not named like images: {what}")
        if destination.is_relative_to(part.root):
            raise ArgumentError(
                f"{destination} is in {part.root}, whose directories are classes. Choose another DST."
            )
    plans.state(destination).mkdir(parents=True, exist_ok=True)
    with plans.locked(destination):
        made = [plans.make(part, given.format, _shards(part, given.shards), given.resize) for part in sources]
        for plan, _ in made:
            if given.overwrite:
                _remove(destination, plan)
            _check_same(destination, plan)
        stored, left_out = [], 0
        for part, (plan, order) in zip(sources, made, strict=True):
            if not (destination / f"{plan.split}.json").exists():
                stored.append(plans.store(plan, part, order, destination))
                continue
            plan.remove_state(destination, keep=f"{plan.split}.json")
            check_sizes(destination, Dataset.open(destination, plan.split).files)
            left_out += plans.listed(destination / f"{plan.split}.problems.tsv", b"left out\t")
            say(f"{plan.split}: already complete. Use --overwrite to write it again.")
        if stored:
            _write(destination, stored, given.num_proc)
        return left_out + sum(_close(destination, plan, given.max_broken) for plan in stored)


def check_sizes(directory: Path, files: Iterable[ShardFile | TableFile]) -> None:
    """Raise an ArgumentError if a file's size differs from the size in the index."""
    for file in files:
        if (size := (path := directory / file.name).stat().st_size) != file.size:
            raise damaged(path, f"it has {size} bytes, but its index says {file.size}")


def _shards(source: Source, wanted: int) -> int:
    """Return the number of files for a split. If ``wanted`` is 0, the number depends on the split's size."""
    images = len(source.places)
    if wanted:
        return min(-(-wanted // 8), images) if source.split == "validation" else wanted
    return max(1, min(round(source.size / _FILE_SIZE), images))


def _remove(destination: Path, plan: SplitPlan) -> None:
    """Remove a split's files, its index and its records in ``.prepare``."""
    for end in ("json", "npy"):
        (destination / f"{plan.split}.{end}").unlink(missing_ok=True)
    former = None
    with suppress(ArgumentError):  # ignore a damaged plan
        former = SplitPlan.read(destination, plan.split)
    for old in (former or plan, plan):
        for shard in range(old.shards):
            (destination / old.name(shard)).unlink(missing_ok=True)
    plan.remove_state(destination)


def _check_same(destination: Path, plan: SplitPlan) -> None:
    """Raise an ArgumentError if a split was not started by this command with the same options and images."""
    former, complete = SplitPlan.read(destination, plan.split), (destination / f"{plan.split}.json").exists()
    if former is None:
        if complete:
            raise ArgumentError(
                f"{destination} has an index of {plan.split} that this command did not write. Choose another "
                "DST, or start again with --overwrite."
            )
        return
    differences = plan.differences(former)
    if not differences and former.changed != plan.changed:
        changed = "files with its images were changed or copied again since"
        if complete:
            say(f"{plan.split}: {changed}")
        else:  # do not mix old and new versions of the images
            differences = [changed]
    if differences:
        raise ArgumentError(
            f"{destination}: {plan.split} was started differently. Now: {'; '.join(differences)}. To resume, "
            "use the same options and images. Otherwise, choose another DST or pass --overwrite."
        )


def _write(destination: Path, stored: Sequence[SplitPlan], processes: int) -> None:
    """Write the files of the plans that are not yet finished."""
    for plan in stored:
        images = f"{amount(plan.images, 'image')} of {amount(len(plan.classes), 'class', 'classes')}"
        say(f"{plan.split}: {images}, {decimal(plan.size)}, into {amount(plan.shards, 'file')}")
    left = [
        (plan, number) for plan in stored for number in range(plan.shards)
        if not plans.finished(destination, plan.name(number))
    ]  # fmt: skip
    if done := sum(plan.shards for plan in stored) - len(left):
        say(f"Resuming: {amount(done, 'file')} complete, {len(left)} left")
    size = round(sum(plan.size / plan.shards for plan, _ in left))
    tasks = [(destination, plan.split, number) for plan, number in left]
    run_tasks(write_file, tasks, processes, PrepareProgress(size, "images"))


def write_file(destination: Path, split: str, number: int) -> tuple[int, int]:
    """Write one file of a plan. Returns the number of images planned for it, and their size in bytes.

    Raises:
        ArgumentError: A file with images has changed or is missing.
    """
    plan = SplitPlan.read(destination, split)
    assert plan is not None
    images = list(zip(*plan.images_of(destination, number), strict=True))
    problems: list[tuple[str, str, str]] = []

    def samples() -> Iterator[Sample]:
        for name, (tar, label, offset, length) in images:
            source = plan.tars[tar] if tar >= 0 else f"{plan.root}/{name}"
            try:
                cleaned = clean(_read(source, int(offset), int(length), tar >= 0), plan.resize)
            except BrokenImage as error:
                problems.append(("left out", name, str(error)))
                continue
            if cleaned.note:
                problems.append(("converted", name, cleaned.note))
            yield Sample(cleaned.image, int(label), plan.classes[label], name, cleaned.height, cleaned.width)

    file, rows = write_shard(destination / plan.name(number), plan.format, samples())
    plans.record(destination, file, "rows", rows, problems=problems)
    return len(images), sum(int(place["length"]) for _, place in images)


def _read(path: str, offset: int, length: int, shared: bool) -> bytes:
    """Read an image from its file, or from a tar if ``shared``. Tars are kept open."""
    try:
        data = os.pread(_open(path), length, offset) if shared else Path(path).read_bytes()
    except OSError as error:
        if error.errno == errno.EIO:
            raise BrokenImage(f"cannot be read: {error.strerror}") from None
        raise ArgumentError(f"{path}: {error.strerror}. Do not change SRC while it is read.") from None
    if len(data) != length:
        raise ArgumentError(f"{path} no longer has {length} bytes. Start again with --overwrite.")
    return data


@cache
def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def _close(destination: Path, plan: SplitPlan, max_broken: int | None) -> int:
    """Write a split's index, and list its problems. Returns the number of images left out."""
    records = [plans.record_of(destination, plan.name(shard)) for shard in range(plan.shards)]
    problems = sorted(tuple(problem) for record in records for problem in record["problems"])
    left_out = sum(problem[0] == "left out" for problem in problems)
    plans.list_problems(path := destination / f"{plan.split}.problems.tsv", problems)
    what = f"{left_out} of {plan.images} images in {plan.split}"
    plans.check_broken(what, left_out, plan.images, max_broken, path)
    made = plan.close(destination, [ShardFile(**record["file"]) for record in records])
    size = sum(file.size for file in made.files)
    say(f"{plan.split}: {amount(len(made), 'image')} in {amount(len(made.files), 'file')}, {decimal(size)}")
    if converted := len(problems) - left_out:
        say(f"{plan.split}: {amount(converted, 'image')} converted, listed in {path}")
    return left_out
