"""A transport for the engine's exchanges that simulates the network and shared memory.

The exchanges in ``ringdance.core`` run unchanged, but they neither send data nor access array elements:

- Every array is a ``Traced`` view of memory that is never written. Copying, adding or converting an array
  takes as much simulated time as the modeled machine would need for that many bytes.
- Operations on ``SimulatedWindow`` and ``SimulatedTransport`` complete when the modeled machine would have
  completed them.

Note [One host for all]
    All hosts have the same number of ranks. Their exchange plans are therefore identical, and corresponding
    ranks do the same work at the same time, so only a single host needs to be executed. A message to a rank
    on another host is delivered to that rank's counterpart on the executed host, in place of the message
    that the sender's counterpart would send there. This is exact, with two exceptions: blocks whose sizes
    differ by one element, and MPI's all-reduce, whose members send unequal amounts. We execute the first
    host, which sends the most.

Messages are modeled after Open MPI's libnbc (ompi/mca/coll/libnbc in its sources). All-to-all and all-gather
send one message to each member. An all-reduce uses a binomial tree if it is smaller than 64 KiB, is in place,
or has fewer than four members. Other all-reduces use recursive halving and doubling (Rabenseifner) among a
power of two of the members. Each remaining member sends its data to a neighbor and gets the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ringdance.core.transport.base import Array, Hierarchy, Identity, Pending, Transport
from ringdance.core.transport.window import Window
from ringdance.tools.plan.machine import Core, SimulatedHost, traced

_TREE_BELOW = 64 << 10  # size in bytes below which Open MPI's Iallreduce uses a tree


class SimulatedWindow(Window):
    """The memory shared by the ranks on a host. A synchronization completes when the last rank arrives.

    Args:
        core: This rank's core.
        peers: Windows of the ranks on this host, by local index. The constructor appends the new window.
        members: Final length of ``peers``, when all ranks on this host exist.
        memory: Memory with the size of an exchange buffer. Its contents do not matter.
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
    """A collective in progress, from the perspective of one member.

    Attributes:
        parts: Number of parts that have not arrived yet.
        busy: Core time in seconds that receiving the parts takes.
        time: Time at which the last part arrived. Initially, the time at which the collective was started.
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
    """Return the cost of Open MPI's Iallreduce: bytes and messages sent by ``rank``, path, and rounds.

    The path is the number of bytes that must cross links sequentially from the start to the end of the
    all-reduce.
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
    """A communicator: the hosts of its members, and the collectives in progress on executed members.

    Attributes:
        hosts: Host of each member. All hosts may be represented by the same ``SimulatedHost``. See Note [One
            host for all].
        numbers: Host number of each member.
        executed: Transports of the executed members, by member.
        pending: Started collectives, by collective number and member.
        early: Arrival times of parts that arrived before the collective was started. Keys as in ``pending``.
    """

    hosts: Sequence[SimulatedHost]
    numbers: Sequence[int]
    executed: dict[int, SimulatedTransport] = field(default_factory=dict)
    pending: dict[tuple[int, int], _Collective] = field(default_factory=dict)
    early: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def arrive(self, number: int, member: int, time: float) -> None:
        """Deliver a part of collective ``number`` to a member, which may not have started it yet."""
        if (number, member) in self.pending:
            self.pending[number, member].arrived(time)
        else:
            self.early.setdefault((number, member), []).append(time)


class SimulatedTransport(Transport):
    """The transport of one executed member of a ``Group``. Supports only the collectives used by all-reduces.

    Args:
        core: This rank's core.
        group: The communicator.
        rank: Rank of this member in the communicator.
        identities: Identities of all members.
        host_group: Ranks of the members on this host.

    Attributes:
        cross: Group of the ranks with the same local index on all hosts, for ``hierarchy``.
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
        """Exchange messages with all members. ``sends`` and ``receives`` list the bytes by member."""
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
        """Return an event that starts sending ``count`` messages. The last one is ready at ``last``."""
        number, source, target = self._number, self.core.host, self.group.hosts[member]
        machine, seconds = self.core.machine, nbytes / self.core.machine.bandwidth

        def leave(time: float) -> None:
            source.out_free = max(max(source.out_free, time) + seconds, last + seconds / count)
            target.in_free = max(source.out_free + machine.latency, target.in_free + seconds)
            source.sent += nbytes
            source.messages += count
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
        """Simulate the traffic of MPI's all-reduce, which completes on all members at the same time."""
        machine, numbers, end, busy = self.core.machine, self.group.numbers, time, 0.0
        for member, transport in self.group.executed.items():
            host = transport.core.host
            if not member or numbers[member] != numbers[member - 1]:  # count each host once
                traffic = allreduce_traffic(numbers[-1] + 1, numbers[member], nbytes, in_place)
                sent, messages, path, rounds = traffic
                host.out_free = max(host.out_free, time) + sent / machine.bandwidth
                end = max(end, max(host.out_free, time + path / machine.bandwidth) + rounds * machine.latency)
                host.in_free = max(host.in_free, end)
                host.sent += sent
                host.messages += messages
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
        raise NotImplementedError("The simulated transport only supports what all-reduces need.")

    broadcast = split = post = messages = state = close = cast(Any, _absent)
