"""What the launcher knows of a running rank, and what it makes of all of them in the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringdance.launch.cause import Cause, Ended, Verdict, judge
from ringdance.launch.output import Sink, Stream, open_files
from ringdance.launch.wire import Channel


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
    rank: int, ranks: int, out: Sink, err: Sink, prefix: bool, folder: Path | None
) -> tuple[Stream, Stream]:
    """The stdout and stderr of a rank.

    Raises:
        OSError: its files cannot be made in `folder`.
    """
    out_file, err_file = open_files(folder, rank, ranks) if folder else (None, None)
    text = f"[{rank}] ".encode() if prefix else b""
    return Stream(out, text, out_file), Stream(err, text, err_file, holds=True)


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


def nothing() -> int:
    """A descriptor that reads as empty."""
    return os.open(os.devnull, os.O_RDONLY)


def short_folder() -> str:
    """A folder for temporary files whose path leaves room in a socket's address (108 bytes; macOS 104)."""
    folder = tempfile.gettempdir()
    return folder if len(folder.encode()) < 70 else "/tmp"
