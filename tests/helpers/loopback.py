"""n ranks as threads of one process: the transport for the engine's tests.

::

    world = LoopbackWorld(4, hosts=("a", "a", "b", "b"), seed=7, delay=0.3)
    results = world.run(program)          # program(transport) on one thread for each rank
    world.kill(2)                         # rank 2 dies: its calls raise, and other ranks see that it is gone

``delay`` is the probability that testing a collective that could complete reports it as incomplete, and that
a message arrives later than it could. Orders then differ between ranks and between runs. The same ``seed``
reproduces them, except for the order in which the threads themselves run.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ringdance.core.transport.base import Array, Hierarchy, Identity, Pending, Transport
from ringdance.core.transport.window import Window, window_size

__all__ = ["LoopbackTransport", "LoopbackWorld", "RankKilled"]

T = TypeVar("T")

# As in MPI libraries, min and max compare: whether a NaN is kept or dropped depends on its position.
_REDUCE: dict[str, Any] = {
    "sum": np.add,
    "min": lambda total, part, out: np.copyto(out, part, where=part < total),
    "max": lambda total, part, out: np.copyto(out, part, where=part > total),
    "product": np.multiply,
    "and": np.bitwise_and,
}


class RankKilled(BaseException):
    """Raised in the thread of a rank that the test has killed."""


class _Board:
    """State shared by the members of one communicator.

    Attributes:
        contributed: Contributions by collective number, then by rank.
        completed: How many ranks have completed each collective, by number.
    """

    def __init__(
        self, world: LoopbackWorld, ranks: tuple[int, ...], window_bytes: int, vector_bytes: int
    ) -> None:
        self.world = world
        self.ranks = ranks
        self.lock = threading.Lock()
        self.contributed: dict[int, dict[int, Any]] = {}
        self.completed: Counter[int] = Counter()
        self.children: dict[tuple[Any, ...], _Board] = {}
        self.notes: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in range(len(ranks))}
        self.window_bytes = window_bytes
        self.vector_bytes = vector_bytes
        self.memory: dict[str, Array] = {}
        if window_bytes:
            for host in {world.hosts[rank] for rank in ranks}:
                count = sum(world.hosts[rank] == host for rank in ranks)
                size = window_size(count, vector_bytes, window_bytes)
                self.memory[host] = np.zeros(size // 8, np.int64).view(np.uint8)


@dataclass
class _LoopbackPending:
    """A collective on one rank: number ``number`` of its communicator."""

    transport: LoopbackTransport
    number: int
    finish: Callable[[list[Any]], None]
    done: bool = False

    def test(self) -> bool:
        if self.done:
            return True
        transport = self.transport
        transport.check_alive()
        board = transport.board
        with board.lock:
            contributed = board.contributed[self.number]
            if len(contributed) < transport.size or transport.delayed():
                return False
            self.finish([contributed[rank] for rank in range(transport.size)])
            board.completed[self.number] += 1
            if board.completed[self.number] == transport.size:
                del board.contributed[self.number], board.completed[self.number]
        self.done = True
        return True


class LoopbackTransport(Transport):
    """One rank's transport for a communicator of a ``LoopbackWorld``."""

    def __init__(self, board: _Board, rank: int, parent: LoopbackTransport | None = None) -> None:
        world = board.world
        self.board = board
        self.rank = rank
        self.size = len(board.ranks)
        self.identities = tuple(Identity(other, world.hosts[other], os.getpid()) for other in board.ranks)
        host = world.hosts[board.ranks[rank]]
        self.host_group = tuple(i for i, other in enumerate(board.ranks) if world.hosts[other] == host)
        self._number = 0
        self._splits = 0
        self._subsets = Counter[tuple[int, ...]]()
        self._random = random.Random(f"{world.seed} {board.ranks} {rank}")
        if board.window_bytes:
            self.window = Window(
                board.memory[host],
                self.host_group.index(rank),
                len(self.host_group),
                board.vector_bytes,
                board.window_bytes,
                fence=lambda: None,
                shared=self.shared_events(parent),
            )
            self.event_count = self.window.event_count

    def check_alive(self) -> None:
        if self.board.ranks[self.rank] in self.board.world.dead:
            raise RankKilled(f"rank {self.board.ranks[self.rank]} was killed")

    def delayed(self) -> bool:
        return self._random.random() < self.board.world.delay

    def _start(self, contribution: Any, finish: Callable[[list[Any]], None]) -> Pending:
        self.check_alive()
        with self.board.lock:
            self.board.contributed.setdefault(self._number, {})[self.rank] = contribution
        self._number += 1
        return _LoopbackPending(self, self._number - 1, finish)

    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        target = buffer if receive is None else receive

        def finish(parts: list[Any]) -> None:
            total = parts[0].copy()
            for part in parts[1:]:
                _REDUCE[operation](total, part, out=total)
            target[...] = total

        return self._start(buffer.copy(), finish)

    def broadcast(self, buffer: Array, root: int) -> Pending:
        def finish(parts: list[Any]) -> None:
            if self.rank != root:
                buffer[...] = parts[root]

        return self._start(buffer.copy() if self.rank == root else None, finish)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        def finish(parts: list[Any]) -> None:
            receive[: sum(counts)] = np.concatenate(parts)

        return self._start(send.copy(), finish)

    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        bounds = np.cumsum([0, *send_counts])
        sent = [send[bounds[i] : bounds[i + 1]].copy() for i in range(self.size)]

        def finish(parts: list[Any]) -> None:
            receive[: sum(receive_counts)] = np.concatenate([part[self.rank] for part in parts])

        return self._start(sent, finish)

    def _child(self, key: tuple[Any, ...], chosen: Sequence[int], window_bytes: int) -> LoopbackTransport:
        board = self.board
        with board.lock:
            if key not in board.children:
                ranks = tuple(board.ranks[i] for i in chosen)
                board.children[key] = _Board(board.world, ranks, window_bytes, board.vector_bytes)
        return LoopbackTransport(board.children[key], list(chosen).index(self.rank), self)

    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        self.check_alive()
        self._splits += 1
        if self.rank not in members:
            return None
        window_bytes = window_bytes if self.board.world.window else 0
        return self._child(("split", self._splits, tuple(members)), members, window_bytes)

    def subset(self, members: Sequence[int], window_bytes: int) -> Transport:
        self.check_alive()
        self._subsets[tuple(members)] += 1
        window_bytes = window_bytes if self.board.world.window else 0
        return self._child(("subset", self._subsets[tuple(members)], tuple(members)), members, window_bytes)

    def hierarchy(self) -> Hierarchy | None:
        groups: dict[str, list[int]] = {}
        for rank, identity in enumerate(self.identities):
            groups.setdefault(identity.host, []).append(rank)
        sizes = tuple(len(group) for group in groups.values())
        if len(sizes) == 1 or max(sizes) == 1 or not self.board.window_bytes:
            return None
        index = self.host_group.index(self.rank)
        self._splits += 1
        cross = None
        if index < min(sizes):
            members = [group[index] for group in groups.values()]
            cross = self._child(("cross", self._splits, index), members, 0)
        return Hierarchy(sizes, self.board.window_bytes, cross)

    def post(self, rank: int, message: bytes) -> None:
        self.check_alive()
        with self.board.lock:
            self.board.notes[rank].append((self.rank, message))

    def messages(self) -> list[tuple[int, bytes]]:
        self.check_alive()
        with self.board.lock:
            if self.delayed():
                return []
            notes, self.board.notes[self.rank] = self.board.notes[self.rank], []
        return notes

    def state(self, rank: int) -> str:
        if self.board.ranks[rank] in self.board.world.dead:
            return "gone"
        return "running" if rank in self.host_group else "unknown"

    def close(self, agreed: bool) -> None:
        pass


class LoopbackWorld:
    """A job with ``size`` ranks in this process.

    Args:
        size: Number of ranks.
        hosts: Host of each rank. By default, all ranks share one host.
        window: If True, the ranks of a host share memory.
        buffer_bytes: Size of each rank's buffers in the shared memory.
        seed, delay: Described at the top of this module.
    """

    def __init__(
        self,
        size: int,
        *,
        hosts: Sequence[str] | None = None,
        window: bool = True,
        buffer_bytes: int = 1 << 16,
        vector_bytes: int = 4096,
        seed: int = 0,
        delay: float = 0.0,
    ) -> None:
        self.size = size
        self.hosts = tuple(hosts) if hosts else ("loopback",) * size
        self.window = window
        self.seed = seed
        self.delay = delay
        self.dead: set[int] = set()
        self._board = _Board(self, tuple(range(size)), buffer_bytes if window else 0, vector_bytes)

    def transport(self, rank: int) -> LoopbackTransport:
        """Return the transport of one rank."""
        return LoopbackTransport(self._board, rank)

    def kill(self, rank: int) -> None:
        """Make a rank die: its next calls raise ``RankKilled``, and other ranks see that it has exited."""
        self.dead.add(rank)

    def run(self, program: Callable[[LoopbackTransport], T], timeout: float | None = 60.0) -> list[T]:
        """Run ``program`` on one thread per rank and return the results in rank order."""
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def target(rank: int) -> None:
            try:
                results[rank] = program(self.transport(rank))
            except RankKilled:
                pass
            except BaseException as error:
                errors[rank] = error

        threads = [
            threading.Thread(target=target, args=(r,), name=f"rank {r}", daemon=True)
            for r in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        alive = [thread.name for thread in threads if thread.is_alive()]
        if errors:
            raise errors[min(errors)]
        if alive:
            raise TimeoutError(f"{', '.join(alive)} still running after {timeout} s")
        return [results.get(rank) for rank in range(self.size)]  # type: ignore[misc]
