"""How a job is run, what the launcher knows of a running rank, and what it makes of all in the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringdance.errors import LaunchError
from ringdance.launch.cause import Cause, Ended, Verdict, judge
from ringdance.launch.directories import bases, usable
from ringdance.launch.messages import Channel
from ringdance.launch.output.results import Results
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import WITH_RANK, Sink, Stream, Style, open_files
from ringdance.launch.remote.agents import RankChannel

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


@dataclass(frozen=True)
class Options:
    """How to run a plan.

    Attributes:
        screen: where the ranks' output goes.
        fold: whether equal lines of several ranks are shown once (not with JSON, nor in files).
        style: how its lines are shown.
        folder: for per-rank files, or None.
        start_timeout: seconds until all ranks must have started.
        verbose: tell what is done, and show what mpiexec says in full.
        stdin: file descriptor of what rank 0 reads; -1 for nothing.
        files: what is put into the job's folder on every host, by name, for the ranks (call.py).
        needed: files that every host must have.
        results: takes what the ranks leave there as ``result.*.pkl`` if all end well; None: not wanted.
        silence: seconds after which a host that says nothing is lost.
        grace: seconds that ranks have to end after the launcher was asked to stop; a second time ends them.
    """

    screen: Screen
    fold: bool = False
    style: Style = WITH_RANK
    folder: Path | None = None
    start_timeout: float = 60.0
    verbose: bool = False
    stdin: int = -1
    files: Mapping[str, bytes] = field(default_factory=dict)
    needed: Sequence[str] = ()
    results: Results | None = None
    silence: float = 6.0
    grace: float = 0.8

    @property
    def out(self) -> Sink:
        """For the launcher's own lines on stdout."""
        return self.screen.of(0)

    @property
    def err(self) -> Sink:
        """The same on stderr."""
        return self.screen.of(1)


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

    channel: Channel | RankChannel
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
    rank: int,
    ranks: int,
    host: str,
    sinks: tuple[Sink, Sink],
    style: Style,
    folder: Path | None,
    bare: bool = False,
) -> tuple[Stream, Stream]:
    """The stdout and stderr of a rank.

    Raises:
        OSError: its files cannot be made in `folder`.
    """
    out_file, err_file = open_files(folder, rank, ranks) if folder else (None, None)
    names = ("stdout", "stderr")
    if style.json:
        given = [json.dumps({"rank": rank, "host": host, "stream": name})[:-1] + ", " for name in names]
    else:
        given = [style.prefix.format(rank=rank, stream=name, host=host) for name in names]
    colour = _COLOURS[rank % len(_COLOURS)] if style.colour else 0
    out, err = (replace(style, prefix=prefix, colour=colour) for prefix in given)
    return (
        Stream(sinks[0], out, out_file, bare=bare, warn=sinks[1]),
        Stream(sinks[1], err, err_file, holds=True, bare=bare),
    )


def conclude(
    ranks: Iterable[Rank], outside: Sequence[Cause], mpiexec: int | None
) -> tuple[Verdict | None, int]:
    """Judge a job that is over; also how many ranks completed."""
    marks: list[Cause] = []
    ended: dict[int, Ended] = {}
    for rank in ranks:
        marks += rank.streams[1].marks
        if rank.ended:
            err = rank.streams[1]
            ended[rank.rank] = replace(rank.ended, last_words=err.last_words(), last_line=err.last_line())
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


def usable_bases() -> list[str]:
    """Where a job's folder can be made on this host, the best first.

    Raises:
        LaunchError: nowhere.
    """
    found, wrong = usable(bases(os.environ))
    if not found:
        raise LaunchError(
            f"no directory for temporary files ({wrong}). Set TMPDIR to one that can be written"
        )
    return found
