"""How a job is run, what the launcher knows of a running rank, and what it makes of all in the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringdance.launch.cause import Cause, Ended, Verdict, judge
from ringdance.launch.output import WITH_RANK, Sink, Stream, Style, open_files
from ringdance.launch.wire import Channel


@dataclass(frozen=True)
class Options:
    """How to run a plan.

    Attributes:
        out, err: where the ranks' output goes.
        style: how its lines are shown.
        folder: for per-rank files, or None.
        start_timeout: seconds until all ranks must have started.
        verbose: tell what is done, and show what mpiexec says in full.
        stdin: file descriptor of what rank 0 reads; -1 for nothing.
        folder_argument: whether the command gets the job's folder as its last argument.
        prepare: called with the job's folder before the ranks start, and `collect` before it is removed.
    """

    out: Sink
    err: Sink
    style: Style = WITH_RANK
    folder: Path | None = None
    start_timeout: float = 60.0
    verbose: bool = False
    stdin: int = -1
    folder_argument: bool = False
    prepare: Callable[[str], None] = lambda folder: None
    collect: Callable[[str], None] = lambda folder: None


@dataclass
class Rank:
    """A rank whose supervisor has said hello.

    Attributes:
        channel: to its supervisor.
        rank: its number.
        host: its machine.
        streams: its stdout and stderr.
        open: descriptors still being read, with their streams.
        pid: 0 until it has started.
        ended: how, or None.
    """

    channel: Channel
    rank: int
    host: str
    streams: tuple[Stream, Stream]
    open: dict[int, Stream] = field(default_factory=dict)
    pid: int = 0
    ended: Ended | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return bool(self.pid) and self.ended is None

    def read(self, descriptor: int) -> bool | None:
        """Read once from a stream: whether there was something, None at its end (which closes it)."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if data:
            self.open[descriptor].feed(data)
            return True
        self.open.pop(descriptor).end()
        os.close(descriptor)
        return None

    def finish(self) -> None:
        """Read what is left; processes that hold a stream open no longer exist."""
        for descriptor in list(self.open):
            while self.read(descriptor):
                pass
            if descriptor in self.open:
                os.close(descriptor)
        for stream in self.streams:
            stream.end()


def make_streams(
    rank: int, ranks: int, sinks: tuple[Sink, Sink], style: Style, folder: Path | None
) -> tuple[Stream, Stream]:
    """The stdout and stderr of a rank.

    Raises:
        OSError: its files cannot be made in `folder`.
    """
    out_file, err_file = open_files(folder, rank, ranks) if folder else (None, None)
    out, err = (
        replace(style, prefix=style.prefix.format(rank=rank, stream=name)) for name in ("stdout", "stderr")
    )
    return Stream(sinks[0], out, out_file), Stream(sinks[1], err, err_file, holds=True)


def conclude(
    ranks: Iterable[Rank], outside: Sequence[Cause], mpiexec: int | None
) -> tuple[Verdict | None, int]:
    """Judge a job that is over; also how many ranks completed."""
    marks: list[Cause] = []
    ended: dict[int, Ended] = {}
    for rank in ranks:
        marks += rank.streams[1].marks
        if rank.ended:
            ended[rank.rank] = replace(rank.ended, last_words=rank.streams[1].last_words())
    return judge(marks, ended, outside, mpiexec), sum(not end.failed for end in ended.values())


def show_held(ranks: Iterable[Rank], verdict: Verdict | None) -> None:
    """Show the tracebacks that were held back, save those that the frame tells, or that follow from its."""
    told: dict[int | None, Cause] = {}
    if verdict:
        for cause in (verdict.cause, *verdict.others):
            if cause is verdict.cause or cause.follows or cause.message == verdict.cause.message:
                told[cause.rank] = cause
    for rank in ranks:
        if rank.rank in told:
            rank.streams[1].drop(told[rank.rank].traceback)
        else:
            rank.streams[1].release()


def write_all(descriptor: int) -> Sink:
    """A sink that writes to a file descriptor, whole."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    return write


def job_folders(job: str) -> tuple[str, str]:
    """A job's folders (not made yet): for temporary files, and in shared memory, "" if there is none."""
    # The path must leave room in a socket's address (108 bytes; macOS 104).
    folder = tempfile.gettempdir()
    name = f"ringdance-{job[:12]}"
    shared = f"/dev/shm/{name}" if os.access("/dev/shm", os.W_OK) else ""
    return os.path.join(folder if len(folder.encode()) < 70 else "/tmp", name), shared
