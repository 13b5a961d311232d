"""Ranks, hosts and links on a discrete-event clock, as the transport of the engine's exchanges.

The exchanges of ``ringdance.core`` run unchanged; nothing is sent and no element is touched:

- every array is a ``Traced`` view of memory that is never written: what would be copied, added or converted
  costs its rank the time of so many bytes;
- ``SimulatedWindow`` and ``SimulatedTransport`` complete at the time at which the machine would.

Note [One host for all]
    All hosts have as many ranks, so their plans are the same, and their ranks do the same at the same time.
    Then one host is executed for all of them: a message to another host comes back as the one that its
    counterpart sends. That is exact but for blocks that differ by an element, and for MPI's all-reduce,
    whose members send unequally: the host that is executed is the first one, which sends most.

What MPI sends is what Open MPI's libnbc does (ompi/mca/coll/libnbc in its sources). All-to-all and
all-gather: one message to each member. All-reduce below 64 KiB, in place, or of less than four members: a
binomial tree up and down. Else recursive halving and doubling (Rabenseifner) on a power of two of the
members; the others give their part to a neighbour and get the result back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

import numpy as np

from ringdance.core.exchange.base import Context
from ringdance.core.transport.base import Array, Hierarchy, Identity, Pending, Transport
from ringdance.core.transport.window import Window

_TREE_BELOW = 64 << 10  # bytes: where Open MPI's Iallreduce changes its algorithm
Program = Generator[None, None, None]


@dataclass(frozen=True)
class Machine:
    """What a job runs on. All hosts are alike.

    Attributes:
        bandwidth: of a host's link, bytes/s each way.
        latency: from host to host, s.
        memory_bandwidth: bytes/s at which a rank copies, adds or converts while the others of its host do so.
        link_bandwidth: the same between the GPUs of a host (NVLink), where exchanges use them; 0: memory.
        stack_bandwidth: bytes/s at which a rank's core sends or receives (TCP: a few GB/s; RDMA: inf).
        message_seconds: of a core, for each message that a rank sends or receives.
        chunk_seconds: of a core, for each collective or synchronization of a chunk that a rank starts.
        round_seconds: of a core, for each round of agreement.
        ranks_per_core: ranks that share a core; they get it in turns.
        turn: seconds that a step loses for each rank beyond the first on a core; a quarter of it at most.
    """

    bandwidth: float
    latency: float = 20e-6
    memory_bandwidth: float = 8e9
    link_bandwidth: float = 0.0
    stack_bandwidth: float = inf
    message_seconds: float = 2e-6
    chunk_seconds: float = 10e-6
    round_seconds: float = 100e-6
    ranks_per_core: float = 1.0
    turn: float = 8e-3


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0

    def at(self, time: float, event: Callable[[float], None]) -> None:
        """Call ``event(time)`` when all earlier ones have happened."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, event))

    def run(self) -> None:
        """Let all events happen."""
        while self._events:
            time, _, event = heapq.heappop(self._events)
            event(time)


@dataclass(eq=False)
class Host:
    """A host: when its link is free again each way, and what it has sent.

    Attributes:
        sent: bytes to other hosts; ``messages``: to other hosts.
    """

    out_free: float = 0.0
    in_free: float = 0.0
    sent: int = 0
    messages: int = 0

    def count(self, nbytes: int, messages: int) -> None:
        """Note what it has sent."""
        self.sent += nbytes
        self.messages += messages


@dataclass(eq=False)
class Core:
    """What executes a rank's program.

    Attributes:
        now: the rank's time, s: up to it the core has been busy or waiting.
        calls: the transport's collectives between hosts that were started: name and bytes given to each.
    """

    machine: Machine
    clock: Clock
    host: Host
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)
    context: Context = field(default_factory=Context)
    program: Program | None = None

    def spend(self, seconds: float) -> None:
        """Be busy."""
        self.now += seconds * self.machine.ranks_per_core

    def move(self, nbytes: int) -> None:
        """Copy, add or convert."""
        self.spend(nbytes / (self.machine.link_bandwidth or self.machine.memory_bandwidth))

    def messages(self, count: int, nbytes: int) -> float:
        """Return the seconds in which it sends or receives so much."""
        return count * self.machine.message_seconds + nbytes / self.machine.stack_bandwidth

    def resume(self, time: float) -> None:
        """Continue the program until it waits; what it waits for resumes it."""
        if self.program is None:
            return
        self.now = max(self.now, time)
        achieved = self.context.achieved
        try:
            next(self.program)
        except StopIteration:
            self.program = None
            return
        if self.context.achieved != achieved:  # it has only let others go on
            self.clock.at(self.now, self.resume)

    def until(self, time: float) -> Program:
        """Sleep."""
        self.clock.at(time, self.resume)
        while self.now < time:
            yield


class Traced(np.ndarray[Any, Any]):
    """An array of which only the size counts: operations cost ``core`` time and leave memory alone."""

    core: Core | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.core = getattr(other, "core", None)

    def _moved(self) -> None:
        if self.core is not None:
            self.core.move(self.nbytes)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is Ellipsis:
            self._moved()
        else:
            self[key]._moved()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **_: Any) -> Any:
        result = out[0] if out else next(part for part in inputs if isinstance(part, Traced))
        traced = result if isinstance(result, Traced) else self
        traced._moved()
        return result

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:
        """Return an array of another dtype."""
        made = traced(np.empty(self.shape, dtype), self.core)
        made._moved()
        return made


def traced(memory: Array, core: Core | None) -> Traced:
    """Return a view of ``memory`` whose use costs ``core`` time."""
    view = memory.view(Traced)
    view.core = core
    return view


def trace(part: Any, core: Core) -> None:
    """Replace all arrays that an exchange holds, also in its parts, by traced ones."""
    for name, value in list(vars(part).items()):
        if isinstance(value, np.ndarray):
            setattr(part, name, traced(value, core))
        for inner in value if isinstance(value, list) else (value,):
            if type(inner).__module__.startswith("ringdance.core.exchange.") and hasattr(inner, "__dict__"):
                trace(inner, core)


class SimulatedWindow(Window):
    """The memory that the ranks of a host share: a synchronization ends when the last of them has come.

    Args:
        core: of this rank.
        peers: the windows of the host's ranks by local index; this one adds itself.
        members: how many there will be.
        memory: of any contents, as large as a buffer.
    """

    def __init__(self, core: Core, peers: list[SimulatedWindow], members: int, memory: Array) -> None:
        self._core, self._row, self._signals = core, peers, list[float]()
        self.index, self.members, self.buffer_bytes = len(peers), members, memory.nbytes
        self.buffers, self.buffer_parity = [[traced(memory, core)] * members] * 2, 0
        peers.append(self)

    def signal(self) -> None:
        core = self._core
        core.spend(core.machine.chunk_seconds)
        self._signals.append(core.now)
        if all(len(peer._signals) >= len(self._signals) for peer in self._row):
            last = max(peer._signals[len(self._signals) - 1] for peer in self._row)
            for peer in self._row:
                core.clock.at(last, peer._core.resume)

    def reached(self) -> bool:
        count, now = len(self._signals), self._core.now
        return all(len(peer._signals) >= count and peer._signals[count - 1] <= now for peer in self._row)


@dataclass(eq=False)
class _Collective(Pending):
    """A collective of one member.

    Attributes:
        parts: how many are still to come.
        busy: seconds of its core for what it receives.
        time: when the last part came, or it was started.
    """

    core: Core
    parts: int
    time: float
    busy: float = 0.0
    done: bool = False

    def arrived(self, time: float) -> None:
        self.time = max(self.time, time)
        self.parts -= 1
        if not self.parts:
            self.core.clock.at(self.time, self.core.resume)

    def test(self) -> bool:
        if not self.done and not self.parts and self.time <= self.core.now:
            self.done = True
            self.core.spend(self.busy)
        return self.done


def allreduce_traffic(members: int, rank: int, nbytes: int, in_place: bool) -> tuple[int, int, int, int]:
    """Return what a member of Open MPI's Iallreduce sends: bytes, messages.

    And of the whole: the bytes that pass a link one after the other, and the number of rounds.
    """
    if members < 4 or nbytes < _TREE_BELOW or in_place:
        levels = (members - 1).bit_length()
        children = sum(rank < 1 << level and rank + (1 << level) < members for level in range(levels))
        messages = children + (rank > 0)
        return messages * nbytes, messages, 2 * levels * nbytes, 2 * levels
    levels = members.bit_length() - 1
    rest, halves = members - (1 << levels), 2 * (nbytes - (nbytes >> levels))
    path, rounds = halves + 2 * nbytes * (rest > 0), 2 * levels + 3 * (rest > 0)
    if rank >= 2 * rest:
        return halves, 2 * levels, path, rounds
    return (nbytes, 2, path, rounds) if rank % 2 else (halves + 3 * nbytes // 2, 2 * levels + 2, path, rounds)


@dataclass(eq=False)
class Group:
    """A communicator: the hosts of its members, and what is under way among those that are executed.

    Attributes:
        hosts: the host of each member; one ``Host`` may be that of all, see Note [One host for all].
        numbers: number of each member's host.
        executed: the members that are executed.
        pending: by number of the collective and member: what was started.
        early: the same: when parts of it came before.
    """

    hosts: Sequence[Host]
    numbers: Sequence[int]
    executed: dict[int, SimulatedTransport] = field(default_factory=dict)
    pending: dict[tuple[int, int], _Collective] = field(default_factory=dict)
    early: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def arrive(self, number: int, member: int, time: float) -> None:
        """A part of the member's ``number``-th collective has come, maybe before it was started."""
        if (number, member) in self.pending:
            self.pending[number, member].arrived(time)
        else:
            self.early.setdefault((number, member), []).append(time)


class SimulatedTransport(Transport):
    """One executed member of a ``Group``; collectives that all-reduces do not need are not there.

    Args:
        core: of this rank.
        group: the communicator.
        rank: in it.
        identities: of all members.
        host_group: members on this host.

    Attributes:
        cross: the group of the ranks with this local index on all hosts, for ``hierarchy``.
    """

    cross: Group | None = None

    def __init__(
        self, core: Core, group: Group, rank: int, identities: Sequence[Identity], host_group: Sequence[int]
    ) -> None:
        self.core, self.group, self.rank, self.size = core, group, rank, len(group.hosts)
        self.identities, self.host_group, self._number = tuple(identities), tuple(host_group), -1
        group.executed[rank] = self

    def _start(self, name: str, nbytes: int, parts: int) -> _Collective:
        core, group = self.core, self.group
        core.calls.append((name, nbytes))
        core.spend(core.machine.chunk_seconds)
        self._number += 1
        pending = group.pending[self._number, self.rank] = _Collective(core, parts, core.now)
        for time in group.early.pop((self._number, self.rank), ()):
            pending.arrived(time)
        return pending

    def _linear(self, name: str, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        """Send a message to each member and get one from each; bytes by member."""
        core, group, numbers = self.core, self.group, self.group.numbers
        following = [*range(self.rank + 1, self.size), *range(self.rank)]
        others = [i for i in following if numbers[i] != numbers[self.rank]]
        targets, sources = ([i for i in others if nbytes[i]] for nbytes in (sends, receives))
        folded = bool(targets) and group.hosts[targets[0]] is core.host
        pending = self._start(name, sum(sends), 2 if folded else 1 + len(sources))
        pending.busy = core.messages(len(sources), sum(receives[i] for i in sources))
        core.move(sum(sends) - sum(sends[i] for i in others))
        first = core.now + core.machine.message_seconds * core.machine.ranks_per_core
        for i in targets:
            core.spend(core.messages(1, sends[i]))
            if not folded:
                core.clock.at(core.now, self._leave(i, sends[i], 1, core.now))
        if folded:
            total = sum(sends[i] for i in targets)
            core.clock.at(first, self._leave(self.rank, total, len(targets), core.now))
        group.arrive(self._number, self.rank, core.now)
        return pending

    def _leave(self, member: int, nbytes: int, count: int, last: float) -> Callable[[float], None]:
        """Return the event: ``count`` messages begin to leave, the last of which is there at ``last``."""
        number, source, target = self._number, self.core.host, self.group.hosts[member]
        machine, seconds = self.core.machine, nbytes / self.core.machine.bandwidth

        def leave(time: float) -> None:
            source.out_free = max(max(source.out_free, time) + seconds, last + seconds / count)
            target.in_free = max(source.out_free + machine.latency, target.in_free + seconds)
            source.count(nbytes, count)
            self.group.arrive(number, member, target.in_free)

        return leave

    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        return self._linear("alltoall", send_counts, receive_counts)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        return self._linear("allgather", [counts[self.rank]] * self.size, counts)

    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        pending, number, group = self._start("allreduce", buffer.nbytes, 1), self._number, self.group
        started = [group.pending.get((number, member)) for member in group.executed]
        if all(started):
            last = max(each.time for each in started if each)
            self.core.clock.at(last, lambda time: self._reduce(number, time, buffer.nbytes, receive is None))
        return pending

    def _reduce(self, number: int, time: float, nbytes: int, in_place: bool) -> None:
        """Let all members send what MPI's all-reduce does; all end together."""
        machine, numbers, end, busy = self.core.machine, self.group.numbers, time, 0.0
        for member, transport in self.group.executed.items():
            host = transport.core.host
            if not member or numbers[member] != numbers[member - 1]:  # one of a host sends to others
                traffic = allreduce_traffic(numbers[-1] + 1, numbers[member], nbytes, in_place)
                sent, messages, path, rounds = traffic
                host.out_free = max(host.out_free, time) + sent / machine.bandwidth
                end = max(end, max(host.out_free, time + path / machine.bandwidth) + rounds * machine.latency)
                host.in_free = max(host.in_free, end)
                host.count(sent, messages)
                busy = self.core.messages(2 * max(rounds, 2 * (self.size - 1).bit_length()), 2 * path)
        for member in self.group.executed:
            self.group.pending[number, member].busy = busy
            self.group.arrive(number, member, end)

    def hierarchy(self) -> Hierarchy | None:
        if self.cross is None or self.window is None:
            return None
        per_host = len(self.host_group)
        host, local = divmod(self.rank, per_host)
        cross = SimulatedTransport(self.core, self.cross, host, self.identities[local::per_host], (host,))
        return Hierarchy((per_host,) * (self.size // per_host), self.window.buffer_bytes, cross)

    def _absent(self, *_: Any) -> Any:
        raise NotImplementedError("Simulations are of all-reduces: there is nothing else on this transport.")

    broadcast = split = post = messages = state = cast(Any, _absent)

    def close(self, agreed: bool) -> None:
        pass
