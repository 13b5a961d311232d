"""Write the files of a plan, as one of several ``python -m ringdance.data.prepare.work DST RUN SPLITS``.

A process takes a file by making ``.prepare/run.RUN/NAME``, which only one can. A file that a killed process
has begun is free in the next run. What is done goes to stdout, as lines for :mod:`progress`.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from ringdance.data.files import npy, write_whole
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.data.prepare.plan import Plan, state
from ringdance.data.prepare.progress import MARK
from ringdance.data.sample import Sample
from ringdance.data.writing import write_shard
from ringdance.errors import ArgumentError

_REPORT_S = 0.5

Report = Callable[[int, int], None]
"""Takes the number of images, and of their bytes, that have been written since the last call."""
Work = Callable[[Path, str, str, Report], None]
"""Takes the directory of a data set, the name of this run, and which part of the work is meant."""


def work(destination: Path, run: str, splits: str, report: Report) -> None:
    """Write files until none is left that no other process has taken.

    Raises:
        ArgumentError: an image is not as it was when the plan was made.
    """
    for split in splits.split(","):
        plan = Plan.read(destination, split)
        assert plan is not None
        for shard in range(plan.shards):
            if taken(destination, run, plan.name(shard)) and not plan.finished(destination, shard):
                _write(plan, destination, shard, report)


def taken(destination: Path, run: str, name: str) -> bool:
    """Whether this process is the first of a run that takes a file."""
    try:
        os.close(os.open(state(destination) / f"run.{run}" / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def _write(plan: Plan, destination: Path, shard: int, report: Report) -> None:
    problems: list[tuple[str, str, str]] = []
    samples = _samples(plan, destination, shard, problems, report)
    file, rows = write_shard(destination / plan.name(shard), plan.format, samples)
    own = state(destination) / plan.name(shard)
    crc = write_whole(beside := own.with_name(f"{own.name}.rows.npy"), npy(rows))
    about = {"file": asdict(file), "problems": problems, "crc32c": {beside.name: crc}}
    write_whole(own.with_name(f"{own.name}.json"), json.dumps(about).encode())


def _samples(
    plan: Plan, destination: Path, shard: int, problems: list[tuple[str, str, str]], report: Report
) -> Iterator[Sample]:
    """Iterate over a file's images that can be decoded; note what was converted or left out."""
    images = size = 0
    last = time.monotonic()
    for name, (tar, label, offset, length) in zip(*plan.images_of(destination, shard), strict=True):
        source = plan.tars[tar] if tar >= 0 else f"{plan.root}/{name}"
        try:
            data = _read(source, int(offset), int(length), tar >= 0)
            found = clean(data, plan.resize)
            if found.note:
                problems.append(("converted", name, found.note))
            synset = plan.classes[label]
            text = plan.texts.get(synset, "")
            yield Sample(found.image, int(label), synset, name, found.height, found.width, text)
        except BrokenImage as error:
            problems.append(("left out", name, str(error)))
        images, size = images + 1, size + int(length)
        if time.monotonic() - last > _REPORT_S:
            report(images, size)
            images, size, last = 0, 0, time.monotonic()
    report(images, size)


def _read(path: str, offset: int, length: int, shared: bool) -> bytes:
    """Read an image from its own file or from a tar, which stays open."""
    descriptor = -1
    try:
        descriptor = _open(path) if shared else os.open(path, os.O_RDONLY)
        data = os.pread(descriptor, length + (not shared), offset)
    except OSError as error:
        if error.errno == errno.EIO:
            raise BrokenImage(f"cannot be read: {error.strerror}") from None
        raise ArgumentError(
            f"{path}: {error.strerror}. SRC must stay as it is, on a file system that all hosts share"
        ) from None
    finally:
        if not shared and descriptor >= 0:
            os.close(descriptor)
    if len(data) != length:
        raise ArgumentError(f"{path} has changed: it had {length} bytes. Begin anew with --overwrite")
    return data


@cache
def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def run_process(work: Work, words: Sequence[str]) -> int:
    """Work as one of several processes, report on stdout; returns the exit code.

    Args:
        work: what to do.
        words: of the command line: directory of the data set, name of the run, part of the work.
    """
    destination, run, part = Path(words[0]), *words[1:]

    def report(images: int, size: int) -> None:
        print(f"{MARK}{images} {size}", flush=True)

    try:
        if not (state(destination) / f"run.{run}").is_dir():
            raise ArgumentError(
                f"no {state(destination)} here: DST and SRC must be on a file system that all hosts share, "
                "at the same path"
            )
        work(destination, run, part, report)
    except OSError as error:
        problem = f"{error.filename or type(error).__name__}: {error.strerror or error}"
    except ArgumentError as error:
        problem = str(error)
    else:
        return 0
    print(f"host {os.uname().nodename}: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(run_process(work, sys.argv[1:]))
