"""The ranks of a running job: who has come and from where, what they write, and how they ended."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.directories import free_port
from ringdance.launch.hosts import rank_places
from ringdance.launch.messages import Channel
from ringdance.launch.output.merge import LineMerger
from ringdance.launch.output.stream import HELD_S, make_streams
from ringdance.launch.plan import Plan
from ringdance.launch.remote.agents import Agents, RankChannel
from ringdance.launch.running import Options, Rank

AnyChannel = Channel | RankChannel


class RankTable:
    """All ranks of a job, by number once they have come.

    Args:
        plan: who shall come, and where.
        options: where their output goes.
        selector: the job's loop.
        agents: the agents on other hosts.
    """

    def __init__(
        self, plan: Plan, options: Options, selector: selectors.BaseSelector, agents: Agents
    ) -> None:
        self._plan, self._options, self._selector, self._agents = plan, options, selector, agents
        self._places = rank_places(plan.hosts)
        self._ranks: dict[int, Rank] = {}
        # Where rank 0 is to run here, ranks need not wait for it: its wrapper may have been killed.
        here = any(host.local and 0 in host.ranks for host in plan.hosts)
        self._held, self._port = free_port() if here else (None, 0)
        sinks = (options.out, options.err) if options.fold else ()
        self._folds = [LineMerger(sink, plan.ranks) for sink in sinks]

    def welcome(self, channel: AnyChannel, hello: Mapping[str, Any], descriptors: Sequence[int] = ()) -> str:
        """Let a rank begin, once there is a port for MASTER_PORT; what is wrong with it instead, or "".

        Args:
            channel: to its supervisor.
            hello: what that has said first.
            descriptors: the rank's stdout and stderr, if it is on this host.

        Raises:
            LaunchError: its files cannot be made.
        """
        number, options, host = int(hello["rank"]), self._options, str(hello["host"])
        try:
            out, err = [fold.sink_of(number) for fold in self._folds] or (
                options.screen.of(0, number),
                options.screen.of(1, number),
            )
            streams = make_streams(
                number, self._plan.ranks, host, (out, err), options.style, options.folder, options.fold
            )
        except OSError as error:
            raise LaunchError(f"--output-filename {options.folder}: {error}") from None
        wrong = self._misplaced(number, int(hello["size"]), channel)
        if wrong:
            return wrong
        self._ranks[number] = rank = Rank(channel, number, host, streams)
        rank.open = dict(zip(descriptors, streams, strict=False))
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._selector.register(
                descriptor, selectors.EVENT_READ, lambda d=descriptor: self._read(rank, d)
            )
        if number == 0 and not self._port:
            self._port = int(hello["port"])
            for one in self._ranks.values():
                self._go(one)
        elif self._port or 0 in self._ranks:
            self._go(rank)
        return ""

    def _misplaced(self, number: int, size: int, channel: AnyChannel) -> str:
        if size != self._plan.ranks or number in self._ranks:
            return (
                f"started a world of {size} ranks instead of {self._plan.ranks}: "
                "it does not belong to the MPI library in use"
            )
        planned = next(host for host in self._plan.hosts if number in host.ranks)
        there = channel.remote.host if isinstance(channel, RankChannel) else None
        if there != (None if planned.local else planned.name):
            return f"put rank {number} on {there or 'this machine'} instead of {planned.name}"
        return ""

    def _go(self, rank: Rank) -> None:
        # mpiexec's own forwarding of stdin is not used: Open MPI's does not pass on its end to every program.
        own = rank.rank == 0 and self._options.stdin >= 0
        go = {"go": self._places[rank.rank], "port": self._port}
        if isinstance(rank.channel, RankChannel):
            rank.channel.send({**go, "stdin": own})
            if own:
                self._agents.feed(rank.channel, self._options.stdin)
            return
        stdin = os.dup(self._options.stdin) if own else os.open(os.devnull, os.O_RDONLY)
        try:
            rank.channel.send_with(go, [stdin])
        except OSError:
            pass  # that it is gone will be seen by reading
        os.close(stdin)

    def _read(self, rank: Rank, descriptor: int) -> None:
        if rank.read(descriptor) is None:
            self._selector.unregister(descriptor)

    def wrote(self, channel: AnyChannel, which: int, data: bytes) -> None:
        """A rank on another host has written to stdout (0) or stderr (1), or closed it (no data)."""
        rank = self.of(channel)
        if rank and data:
            rank.streams[which].feed(data)
        elif rank:
            rank.streams[which].end()

    def of(self, channel: AnyChannel) -> Rank | None:
        """The rank at the other end."""
        return next((rank for rank in self._ranks.values() if rank.channel is channel), None)

    def everyone(self) -> list[Rank]:
        """All that have come."""
        return list(self._ranks.values())

    @property
    def come(self) -> int:
        """How many have come."""
        return len(self._ranks)

    @property
    def started(self) -> bool:
        """Whether all have come and run."""
        return self.come == self._plan.ranks and all(rank.pid for rank in self._ranks.values())

    @property
    def over(self) -> bool:
        """Whether all have come and ended."""
        return self.come == self._plan.ranks and all(rank.ended for rank in self._ranks.values())

    @property
    def failed(self) -> bool:
        """Whether any has failed."""
        return any(rank.ended and rank.ended.failed for rank in self._ranks.values())

    def ended_by_mpiexec(self, numbers: Sequence[int]) -> list[float]:
        """When those of these ranks were ended that mpiexec has ended."""
        ends = (rank.ended for rank in self._ranks.values() if rank.rank in numbers)
        return [end.time for end in ends if end and end.by_mpiexec]

    @property
    def completed(self) -> bool:
        """Whether all have ended well."""
        return self.over and not self.failed

    @property
    def idle(self) -> bool:
        """Whether none that has come still runs."""
        return all(rank.ended for rank in self._ranks.values())

    def signal(self, number: int) -> None:
        """Send a signal to all that run."""
        for rank in self._ranks.values():
            if rank.running:
                rank.channel.send({"signal": number})

    def release(self) -> None:
        """Let mpiexec see that all ranks have ended."""
        for rank in self._ranks.values():
            rank.channel.send({"over": True})

    def own_failure_told(self) -> bool:
        """Whether one that still runs has told of a failure of its own."""
        marks = [mark for rank in self._ranks.values() if rank.running for mark in rank.streams[1].marks]
        return any(not mark.follows for mark in marks)

    def fold_until(self) -> list[float]:
        """When lines that wait for the same of other ranks are to be shown."""
        return [due for fold in self._folds if (due := fold.due()) is not None]

    def unfold(self, everything: bool = False) -> None:
        """Show those for which it is time."""
        for fold in self._folds:
            fold.flush(everything)

    def held_until(self) -> list[float]:
        """When tracebacks that are held back are to be shown."""
        found = (rank.streams[1].held_since for rank in self._ranks.values() if not rank.ended)
        return [since + HELD_S for since in found if since is not None]

    def release_held(self) -> None:
        """Show what has been held back for long enough."""
        now = time.monotonic()
        for rank in self._ranks.values():
            since = rank.streams[1].held_since
            if since is not None and now >= since + HELD_S and not rank.ended:
                rank.streams[1].release()
