"""Prepare a data set: plan, check the disk, write by several processes, close with an index."""

from __future__ import annotations

import fcntl
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from ringdance.data.dataset import Dataset, ShardFile
from ringdance.data.files import needed
from ringdance.data.index import damaged
from ringdance.data.prepare import plan as plans
from ringdance.data.prepare.clean import BrokenImage, clean
from ringdance.data.prepare.plan import Plan, state
from ringdance.data.prepare.progress import PrepareProgress, counted, say
from ringdance.data.prepare.sources import Source, find
from ringdance.data.prepare.work import Work, work
from ringdance.data.tables.table import TableFile
from ringdance.errors import ArgumentError
from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import Style
from ringdance.launch.prepare import prepare as prepare_job
from ringdance.launch.spec import CommandError, JobSpec

_FILE_SIZE = 128 << 20
"""Size of files where --shards is not given."""
_OVERHEAD = {"tfrecord": 350, "webdataset": 1792}
"""Bytes of a sample beside its image, about."""
_TRIED = 40
"""Images that are resized for the estimate of the size."""


@dataclass(frozen=True)
class Options:
    """What `ringdance data prepare` was asked for.

    Attributes:
        format: "tfrecord" or "webdataset".
        shards: number of files of train, or of the only split; 0: by size.
        validation_shards: of validation; 0: an eighth of `shards`, or by size.
        resize: of images' shorter sides in pixels, or 0.
        splits: those wanted; empty for all.
        labels: file with the labels of validation, or None.
        max_broken: images that may be left out; None: one in a hundred.
        overwrite: whether to begin anew.
    """

    format: str
    shards: int = 0
    validation_shards: int = 0
    resize: int = 0
    splits: Sequence[str] = ()
    labels: Path | None = None
    max_broken: int | None = None
    overwrite: bool = False


def prepare(source: Path, destination: Path, options: Options, job: JobSpec) -> int:
    """Write a data set, or what is left of it; return how many images were left out.

    Args:
        source: as of :func:`sources.find`.
        destination: directory; made if it is missing.
        options: of the data set.
        job: the processes that write; its command is set here.

    Raises:
        ArgumentError: it cannot be done so, with the remedy.
        LaunchError: a process failed.
    """
    for module in ("google_crc32c", "PIL", "simplejpeg"):
        needed(module)
    say(f"Looking for images in {source}")
    sources = find(source, options.splits, options.labels)
    for one in sources:
        if one.left_out:
            what = "; ".join(f"{ending}: {counted(names)}" for ending, names in one.left_out.items())
            say(f"{one.split}: left out, as they are not named like images: {what}")
        if destination.is_relative_to(one.root):
            raise ArgumentError(f"{destination} is within {one.root}, whose directories are classes")
    state(destination).mkdir(parents=True, exist_ok=True)
    with locked(destination):
        made = [plans.make(one, options.format, _shards(one, options), options.resize) for one in sources]
        if options.overwrite:
            for plan, _ in made:
                _remove(destination, plan)
        for plan, _ in made:
            _check_same(destination, plan)
        todo, left_out = [], 0
        for one, (plan, order) in zip(sources, made, strict=True):
            if not (destination / f"{plan.split}.json").exists():
                todo.append((one, plan, order))
                continue
            plan.remove_state(destination, keep=f"{plan.split}.json")
            check_sizes(destination, Dataset.open(destination, plan.split).files)
            left_out += listed(destination / f"{plan.split}.problems.tsv", b"left out\t")
            say(f"{plan.split}: complete since an earlier run; --overwrite writes it again")
        _check_space(destination, [(one, plan) for one, plan, _ in todo])
        stored = [plans.store(plan, one, order, destination) for one, plan, order in todo]
        if stored:
            _write(destination, stored, job)
        return left_out + sum(_close(destination, plan, options.max_broken) for plan in stored)


def check_sizes(directory: Path, files: Iterable[ShardFile | TableFile]) -> None:
    """Raise an ArgumentError if a file has not the size that the index says."""
    for one in files:
        if (size := (path := directory / one.name).stat().st_size) != one.size:
            raise damaged(path, f"it has {size} bytes, and {one.size} by the index")


def listed(path: Path, mark: bytes) -> int:
    """Return how often `mark` is in a list of problems; 0 if there is none."""
    return path.read_bytes().count(mark) if path.exists() else 0


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Keep other runs out, where the file system knows locks; remove what killed ones have left."""
    with open(state(destination) / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"another `ringdance data prepare` is writing to {destination}") from None
        except OSError:
            pass
        for path in [*destination.glob(".*-*-of-*"), *state(destination).glob(".*")]:
            path.unlink(missing_ok=True)
        for path in state(destination).glob("run.*"):
            shutil.rmtree(path)
        yield


def _shards(source: Source, options: Options) -> int:
    if source.split == "validation" and options.validation_shards:
        return options.validation_shards
    if options.shards and source.split == "validation":
        return min(-(-options.shards // 8), len(source.places))
    return options.shards or max(1, min(round(source.size / _FILE_SIZE), len(source.places)))


def _remove(destination: Path, plan: Plan) -> None:
    """Remove a split's files and all that is known of it."""
    for end in ("json", "npy"):
        (destination / f"{plan.split}.{end}").unlink(missing_ok=True)
    former = None
    with suppress(ArgumentError):  # a damaged one
        former = Plan.read(destination, plan.split)
    for old in (former or plan, plan):
        for shard in range(old.shards):
            (destination / old.name(shard)).unlink(missing_ok=True)
    plan.remove_state(destination)


def _check_same(destination: Path, plan: Plan) -> None:
    """Raise an ArgumentError if a split was begun in another way, or not by this command."""
    former, complete = Plan.read(destination, plan.split), (destination / f"{plan.split}.json").exists()
    if former is None:
        if complete:
            raise ArgumentError(
                f"{destination} has an index of {plan.split} that this command did not write. Choose another "
                "DST, or begin anew with --overwrite"
            )
        return
    differences = plan.differences(former)
    if not differences and former.changed not in ("", plan.changed):
        changed = "files of its images were changed or copied anew since"
        if complete:
            say(f"{plan.split}: {changed}")
        else:  # each of its files would have another state of the source
            differences = [changed]
    if differences:
        raise ArgumentError(
            f"{destination}: {plan.split} was begun otherwise. Now: {'; '.join(differences)}. Use the same "
            "options and images to resume, another DST, or --overwrite to begin anew"
        )


def _check_space(destination: Path, todo: Sequence[tuple[Source, Plan]]) -> None:
    """Estimate the bytes to be written; raise an ArgumentError if they do not fit on the disk."""
    total = done = 0
    for source, plan in todo:
        size = round(source.size * _ratio(source, plan)) + plan.images * _OVERHEAD[plan.format]
        total += size
        reports = (plan.finished(destination, shard) for shard in range(plan.shards))
        done += sum(report["file"]["size"] for report in reports if report)
        say(
            f"{plan.split}: {plan.images} images of {len(plan.classes)} classes, {decimal(plan.size)}, into "
            f"{plan.shards} files, about {decimal(size)}"
        )
    free = shutil.disk_usage(destination).free
    if todo:
        say(f"{decimal(max(0, total - done))} to write, {decimal(free)} free")
    if total - done > free:
        raise ArgumentError(
            f"{destination}: about {decimal(total - done)} to write, but only {decimal(free)} free. Free "
            "some space, choose another DST, or make images smaller with --resize 256"
        )


def _ratio(source: Source, plan: Plan) -> float:
    """Return the size of some images after resizing, relative to before."""
    if not plan.resize:
        return 1.0
    before = after = 0
    for number in np.linspace(0, plan.images - 1, min(_TRIED, plan.images)).astype(int):
        tar, _, offset, length = source.places[number]
        with open(source.tars[tar] if tar >= 0 else f"{source.root}/{source.name(number)}", "rb") as file:
            file.seek(int(offset))
            data = file.read(int(length))
        try:
            after += len(clean(data, plan.resize).image)
        except BrokenImage:
            continue
        before += len(data)
    return after / max(before, 1)


def _write(destination: Path, stored: Sequence[Plan], job: JobSpec) -> None:
    """Write the files that are missing, by this process or by those of a job."""
    left = [
        (plan.first[n + 1] - plan.first[n], plan) for plan in stored for n in range(plan.shards)
        if not plan.finished(destination, n)
    ]  # fmt: skip
    images = sum(count for count, _ in left)
    if done := sum(plan.shards for plan in stored) - len(left):
        say(f"Resuming: {done} files are complete, {len(left)} are left")
    if not left:
        return
    size = round(sum(count * plan.size / plan.images for count, plan in left))
    run_work(destination, work, ",".join(plan.split for plan in stored), job, PrepareProgress(images, size))


def run_work(destination: Path, work: Work, part: str, job: JobSpec, progress: PrepareProgress) -> None:
    """Work in this process, or in those of a job, which run the module of `work`.

    Args:
        destination: directory of the data set.
        work: what to do.
        part: of the work.
        job: how many processes, and where; its command is set here.
        progress: takes what they report.

    Raises:
        LaunchError: a process failed; all others have been ended.
    """
    name = uuid.uuid4().hex[:12]
    directory = state(destination) / f"run.{name}"
    directory.mkdir()
    try:
        with progress:
            if job.ranks == 1 and not job.hosts:
                work(destination, name, part, progress.add)
            else:
                _run_job([work.__module__, str(destination), name, part], job, progress)
    except BaseException:
        say("Stopped. The same command resumes: files that are complete are not written again.")
        raise
    shutil.rmtree(directory)


def _run_job(words: Sequence[str], job: JobSpec, progress: PrepareProgress) -> None:
    """Start the processes of a module through the launcher; they need no MPI themselves."""
    command = [sys.executable, "-m", *words]
    prepared = prepare_job(replace(job, command=command, style=Style("")), say)
    screen = Screen((progress.feed, lambda data: progress.feed(data)))
    outcome = Job(prepared, screen).run()
    if isinstance(outcome, Verdict):
        raise CommandError(f"a process failed\n{render(outcome, prepared.plan.ranks)}", outcome.code)
    if outcome:
        raise KeyboardInterrupt if outcome == 130 else SystemExit(outcome)


def _close(destination: Path, plan: Plan, max_broken: int | None) -> int:
    """Write the index of a split and the list of problems; return how many images were left out."""
    reports = [plan.finished(destination, shard) or {} for shard in range(plan.shards)]
    problems = sorted(tuple(one) for report in reports for one in report.get("problems", ()))
    left_out = sum(problem[0] == "left out" for problem in problems)
    listed = destination / f"{plan.split}.problems.tsv"
    listed.unlink(missing_ok=True)
    if problems:
        listed.write_text("".join("\t".join(one) + "\n" for one in problems), errors="surrogateescape")
    limit = max(1, plan.images // 100) if max_broken is None else max_broken
    if left_out > limit:
        raise ArgumentError(
            f"{left_out} of {plan.images} images of {plan.split} are broken, listed in {listed}: more than "
            f"--max-broken {limit}, so there is no index. A larger --max-broken finishes in seconds"
        )
    made: Dataset = plan.close(destination)
    size = sum(file.size for file in made.files)
    say(f"{plan.split}: {len(made)} images in {len(made.files)} files, {decimal(size)}")
    if problems:
        converted = len(problems) - left_out
        say(f"{plan.split}: {left_out} broken images left out, {converted} converted: {listed}")
    return int(left_out)
