"""The ranks in a running job: where they run, what they write, and how they ended."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.system.signals import STOPPING
from ringdance.launch.agents import Agents, RankLink
from ringdance.launch.cause import Cause, Ended, Verdict, judge
from ringdance.launch.hosts import counted, rank_numbers, ranks_text
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import Stream, make_streams
from ringdance.launch.prepare import PreparedJob


@dataclass
class Rank:
    """A rank whose wrapper has connected.

    Attributes:
        link: Connection to the rank's wrapper.
        rank: Number of the rank.
        host: Name of the host on which the rank runs.
        streams: The rank's stdout and stderr.
        pid: Process ID, or 0 until the rank has started.
        ended: How the rank ended, or None while it is running.
    """

    link: RankLink
    rank: int
    host: str
    streams: Sequence[Stream]
    pid: int = 0
    ended: Ended | None = None


class RankTable:
    """All ranks in a job. Once a rank has connected, it can be looked up by its number.

    The cost of handling a message, and of each iteration of the job's event loop, does not depend on the
    number of ranks.

    Args:
        prepared: Defines the expected ranks, their hosts, and the style of their output.
        screen: Destination of the ranks' output.
        agents: The agents on all hosts.
    """

    def __init__(self, prepared: PreparedJob, screen: Screen, agents: Agents) -> None:
        self._plan, self._spec = prepared.plan, prepared.spec
        self._screen, self._agents = screen, agents
        self._places = rank_numbers(self._plan.hosts)
        self._host_of = {number: host.name for host in self._plan.hosts for number in host.ranks}
        self._ranks: dict[int, Rank] = {}
        self._by_link: dict[RankLink, Rank] = {}
        self._to_start, self._to_end = set(self._host_of), set(self._host_of)
        self._holding: dict[int, Rank] = {}  # ranks with a held-back traceback, oldest first
        self.lost_hosts: set[str] = set()
        self.alone: dict[int, str] = {}  # framework used by each rank that has not called init()

    def add(self, link: RankLink, hello: Mapping[str, Any]) -> str:
        """Add a rank and let it start. Returns the reason if it must not start, otherwise an empty string.

        Args:
            link: Connection to the rank's wrapper.
            hello: The wrapper's first message.

        Raises:
            LaunchError: The rank's files cannot be created.
        """
        number, size, host = int(hello["rank"]), int(hello["size"]), str(hello["host"])
        if size != self._plan.ranks or number in self._ranks:
            return (
                f"started a world of {counted(size, 'rank')} instead of {self._plan.ranks}: "
                "this mpiexec does not belong to the MPI library in use"
            )
        if link.remote.host != self._host_of[number]:
            return f"placed rank {number} on {link.remote.host} instead of {self._host_of[number]}"
        sinks = self._screen.of(0, number), self._screen.of(1, number)
        directory = self._spec.output_directory
        try:
            several = len(self._plan.hosts) > 1
            streams = make_streams(number, host, sinks, self._spec.style, directory, size, several)
        except OSError as error:
            raise LaunchError(f"--output-filename {directory}: {error}") from None
        self._ranks[number] = self._by_link[link] = Rank(link, number, host, streams)
        link.send({"go": self._places[number], "port": self._agents.port(self._host_of[0])})
        return ""

    def write(self, link: RankLink, which: int, data: bytes) -> None:
        """Process a rank's output on stdout (0) or stderr (1). Empty data means that the stream is closed."""
        rank = self.of(link)
        if rank and data:
            rank.streams[which].feed(data)
            for mark in rank.streams[which].marks:
                link.remote.time_here(mark.time)
        elif rank:
            rank.streams[which].end()
        if rank and not rank.ended and rank.streams[which].held_until is not None:
            self._holding[rank.rank] = rank

    def on_start(self, rank: Rank, pid: int) -> None:
        """Record that a rank has started."""
        rank.pid = pid
        self._to_start.discard(rank.rank)

    def on_end(self, rank: Rank, ended: Ended) -> None:
        """Record how a rank has ended."""
        rank.ended = ended
        self._to_end.discard(rank.rank)
        self._holding.pop(rank.rank, None)

    def of(self, link: RankLink) -> Rank | None:
        """Return the rank whose wrapper is at the other end of the link, or None if it is unknown."""
        return self._by_link.get(link)

    # --- state ---------------------------------------------------------------------------------

    @property
    def connected(self) -> int:
        """Number of ranks that have connected."""
        return len(self._ranks)

    @property
    def started(self) -> bool:
        """True once all ranks have started, even if some have exited since."""
        return not self._to_start

    @property
    def over(self) -> bool:
        """True once all ranks have connected and exited."""
        return not self._to_end

    @property
    def idle(self) -> bool:
        """True if no connected rank is still running."""
        return len(self._to_end) == self._plan.ranks - self.connected

    @property
    def failed(self) -> bool:
        """True if any rank has failed."""
        return any(rank.ended and rank.ended.failed for rank in self._ranks.values())

    @property
    def signals_ended_failed(self) -> bool:
        """True if every failed rank was ended by a signal that asks processes to exit."""
        ends = [rank.ended for rank in self._ranks.values() if rank.ended and rank.ended.failed]
        return all(end.code is not None and {-end.code, end.code - 128} & set(STOPPING) for end in ends)

    @property
    def running(self) -> list[int]:
        """Numbers of the ranks that are running."""
        return sorted(rank.rank for rank in self._ranks.values() if rank.pid and not rank.ended)

    @property
    def completed(self) -> bool:
        """True if all ranks have completed successfully."""
        return self.over and not self.failed

    def not_started(self) -> dict[str, str]:
        """Map "host (ranks 0-3)" to what these ranks, which have not started, are waiting for."""
        waiting = {}
        for host in self._plan.hosts:
            known = [number for number in host.ranks if number in self._ranks]
            missing = [number for number in host.ranks if number not in known or not self._ranks[number].pid]
            if missing:
                waiting[f"{host.name} ({ranks_text(missing)})"] = self._agents.doing(host.name, len(known))
        return waiting

    def ended_by_mpiexec(self, numbers: Sequence[int]) -> list[float]:
        """Return the exit times of the ranks in ``numbers`` that mpiexec ended."""
        ends = (self._ranks[number].ended for number in numbers if number in self._ranks)
        return [end.time for end in ends if end and end.by_mpiexec]

    def own_failure_reported(self) -> bool:
        """Return True if a running rank has reported its own failure."""
        marks = [mark for number in self.running for mark in self._ranks[number].streams[1].marks]
        return any(not mark.follows and mark.kind != "alone" for mark in marks)

    def local_pids(self) -> list[int]:
        """Return the process IDs of the ranks on the launcher's host."""
        return [rank.pid for rank in self._ranks.values() if rank.pid and rank.link.remote.local]

    # --- actions -------------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the wrappers of all ranks that have started."""
        for rank in self._ranks.values():
            if rank.pid:
                rank.link.send(message)

    # --- held-back output ----------------------------------------------------------------------

    def show_due(self) -> float:
        """Show the held-back tracebacks that are due. Return the time at which the next one is due."""
        while self._holding:
            rank = next(iter(self._holding.values()))
            until = rank.streams[1].held_until
            if until is not None and time.monotonic() < until:
                return until
            rank.streams[1].release()
            del self._holding[rank.rank]
        return math.inf

    # --- judgement -----------------------------------------------------------------------------

    def end_streams(self) -> None:
        """Flush the last lines of all streams."""
        for rank in self._ranks.values():
            for stream in rank.streams:
                stream.end()

    def judge(self, outside: Sequence[Cause], mpiexec: int | None) -> tuple[Verdict | None, int]:
        """Find the first failure, and count the completed ranks. See ``cause.judge()`` for the arguments."""
        marks: list[Cause] = []
        ended: dict[int, Ended] = {}
        lost = {n for host in self._plan.hosts if host.name in self.lost_hosts for n in host.ranks}
        for rank in self._ranks.values():
            err = rank.streams[1]
            marks += [replace(mark, time=rank.link.remote.time_here(mark.time)) for mark in err.marks]
            if rank.ended:
                if rank.ended.code is None and rank.rank in lost:
                    rank.ended = replace(rank.ended, why="unreachable, because its host was lost")
                ended[rank.rank] = replace(rank.ended, last_words=err.last_words(), last_line=err.last_line())
        self.alone = {mark.rank or 0: mark.message for mark in marks if mark.kind == "alone"}
        marks = [mark for mark in marks if mark.kind != "alone"]
        verdict = judge(marks, ended, outside, mpiexec)
        if verdict and verdict.cause.kind == "early" and verdict.cause.rank in self.alone:
            never = f"hvd.init(), which all ranks must call, was not called by {ranks_text([*self.alone])}"
            cause = replace(verdict.cause, message=f"{verdict.cause.message}; {never}")
            verdict = replace(verdict, cause=cause)
        return verdict, sum(not end.failed for end in ended.values())

    def show_held(self, verdict: Verdict | None) -> None:
        """Show held-back tracebacks, except those that the verdict shows or that follow from its cause."""
        reported: dict[int | None, Cause] = {}
        if verdict:
            for cause in (verdict.cause, *verdict.others):
                if cause is verdict.cause or cause.follows or cause.same(verdict.cause):
                    reported[cause.rank] = cause
        for rank in self._ranks.values():
            if rank.rank in reported:
                rank.streams[1].drop(reported[rank.rank].traceback)
            else:
                rank.streams[1].release()
