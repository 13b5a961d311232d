"""Options of a running job, the state of its ranks, and the verdict at its end."""

from __future__ import annotations

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
from ringdance.launch.output.stream import WITH_RANK, Sink, Stream, Style
from ringdance.launch.remote.agents import RankChannel


@dataclass(frozen=True)
class Options:
    """How to run a plan.

    Attributes:
        screen: where the ranks' output goes.
        fold: whether equal lines of several ranks are shown once (not with JSON, nor in files).
        style: how lines are shown.
        folder: directory of per-rank files, or None.
        start_timeout: seconds until all ranks must have started.
        verbose: whether steps, and all messages of mpiexec, are shown.
        stdin: file descriptor of rank 0's input; -1 for none.
        files: contents of files in the job's directory on every host, by name, for the ranks (call.py).
        needed: files that every host must have.
        results: takes the ranks' ``result.*.pkl`` from there if all complete, or None.
        silence: seconds without a heartbeat after which a host is lost.
        grace: seconds that ranks have to end after a signal to the launcher; a second signal ends them.
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
        """The launcher's own stdout."""
        return self.screen.of(0)

    @property
    def err(self) -> Sink:
        """The launcher's own stderr."""
        return self.screen.of(1)


@dataclass
class Rank:
    """A rank whose wrapper has connected.

    Attributes:
        channel: to its wrapper.
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
        """Read once; return whether there was data, None at the end, which closes the descriptor."""
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
        """Read the rest; no process holds a stream open any more."""
        for descriptor in list(self.open):
            while self.read(descriptor):
                pass
            if descriptor in self.open:
                os.close(descriptor)
        for stream in self.streams:
            stream.end()


def conclude(
    ranks: Iterable[Rank], outside: Sequence[Cause], mpiexec: int | None
) -> tuple[Verdict | None, int]:
    """Return the verdict on a job that has ended, and how many ranks completed."""
    marks: list[Cause] = []
    ended: dict[int, Ended] = {}
    for rank in ranks:
        marks += rank.streams[1].marks
        if rank.ended:
            err = rank.streams[1]
            ended[rank.rank] = replace(rank.ended, last_words=err.last_words(), last_line=err.last_line())
    return judge(marks, ended, outside, mpiexec), sum(not end.failed for end in ended.values())


def show_held(ranks: Iterable[Rank], verdict: Verdict | None) -> None:
    """Show the tracebacks that were held back, without those in the verdict or caused by its first."""
    reported: dict[int | None, Cause] = {}
    if verdict:
        for cause in (verdict.cause, *verdict.others):
            if cause is verdict.cause or cause.follows or cause.message == verdict.cause.message:
                reported[cause.rank] = cause
    for rank in ranks:
        if rank.rank in reported:
            rank.streams[1].drop(reported[rank.rank].traceback)
        else:
            rank.streams[1].release()


def usable_bases() -> list[str]:
    """Return where a job's directory can be made on this host, the best first.

    Raises:
        LaunchError: nowhere.
    """
    found, wrong = usable(bases(os.environ))
    if not found:
        raise LaunchError(
            f"no directory for temporary files ({wrong}). Set TMPDIR to one that can be written"
        )
    return found
