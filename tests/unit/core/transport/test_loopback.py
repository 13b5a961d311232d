"""The loopback transport keeps the interface's promises, with and without delays."""

from __future__ import annotations

import numpy as np
import pytest
from loopback import LoopbackTransport, LoopbackWorld, RankKilled

from ringdance.core.transport.base import Pending, Transport
from ringdance.core.transport.single import SingleTransport


def finish(pending: Pending) -> None:
    while not pending.test():
        pass


def collectives(transport: Transport) -> None:
    rank, size = transport.rank, transport.size
    for operation, want in (("sum", sum(range(size))), ("min", 0), ("max", size - 1), ("product", 0)):
        buffer = np.full(3, rank)
        finish(transport.allreduce(buffer, operation))
        assert buffer.tolist() == [want] * 3
    bits = np.array([~(1 << rank) & 0xFF], np.uint8)
    finish(transport.allreduce(bits, "and"))
    assert bits[0] == 0xFF & ~((1 << size) - 1)
    for root in range(size):
        word = np.full(4, rank, np.uint8)
        finish(transport.broadcast(word, root))
        assert word.tolist() == [root] * 4
    counts = [2 * other for other in range(size)]
    rows = np.empty(sum(counts), np.uint8)
    finish(transport.allgather(np.full(counts[rank], rank, np.uint8), rows, counts))
    assert rows.tolist() == [other for other in range(size) for _ in range(counts[other])]
    send = np.concatenate([np.full(to, 10 * rank + to, np.uint8) for to in range(size)])
    got = np.empty(rank * size, np.uint8)
    finish(transport.alltoall(send, list(range(size)), got, [rank] * size))
    assert got.tolist() == [10 * other + rank for other in range(size) for _ in range(rank)]


@pytest.mark.parametrize("delay", [0.0, 0.7])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_collectives(size: int, delay: float) -> None:
    LoopbackWorld(size, delay=delay, seed=size).run(collectives)


def test_several_in_flight_finish_in_any_order() -> None:
    def program(transport: LoopbackTransport) -> None:
        buffers = [np.full(2, i + transport.rank) for i in range(5)]
        flying = [transport.allreduce(buffer, "sum") for buffer in buffers]
        for i in (4, 0, 3, 1, 2) if transport.rank else (1, 2, 0, 4, 3):
            finish(flying[i])
            assert buffers[i].tolist() == [2 * i + 1] * 2

    LoopbackWorld(2, delay=0.5).run(program)


def test_hosts_and_splits() -> None:
    def program(transport: LoopbackTransport) -> None:
        rank = transport.rank
        assert transport.host_group == ((0, 1, 3) if rank != 2 else (2,))
        assert not transport.one_host
        part = transport.split([1, 3], 128)
        if rank not in (1, 3):
            assert part is None
            return
        assert part is not None
        assert part.members == (1, 3)
        assert part.one_host
        assert part.window is not None
        assert part.window.members == 2
        assert part.rank == (1, 3).index(rank)
        again = part.split([1], 0)
        assert (again is None) == (rank == 1)
        assert again is None or again.members == (3,)

    LoopbackWorld(4, hosts=("a", "a", "b", "a")).run(program)


def test_hierarchy() -> None:
    """Each local index on all hosts gets a cross-host communicator, with hosts in the same order."""

    def members(transport: LoopbackTransport) -> tuple[int, ...]:
        hierarchy = transport.hierarchy()
        assert hierarchy is not None
        return hierarchy.cross.members if hierarchy.cross is not None else ()

    assert LoopbackWorld(4, hosts=("a", "b", "b", "a")).run(members) == [(0, 1), (0, 1), (3, 2), (3, 2)]
    assert LoopbackWorld(4, hosts=("b", "a", "a", "a")).run(members) == [(0, 1), (0, 1), (), ()]
    world = LoopbackWorld(5, hosts=("a", "a", "b", "b", "b"))
    assert world.run(members) == [(0, 2), (1, 3), (0, 2), (1, 3), ()]
    for hosts in ("aaa", "abc"):
        assert LoopbackWorld(3, hosts=tuple(hosts)).run(lambda transport: transport.hierarchy()) == [None] * 3
    without = LoopbackWorld(3, hosts=("a", "a", "b"), window=False)
    assert without.run(lambda transport: transport.hierarchy()) == [None] * 3


@pytest.mark.parametrize("delay", [0.0, 0.7])
def test_notes_arrive_in_order(delay: float) -> None:
    def program(transport: LoopbackTransport) -> list[tuple[int, bytes]]:
        other = 1 - transport.rank
        for number in range(5):
            transport.post(other, b"%d" % number)
        notes: list[tuple[int, bytes]] = []
        while len(notes) < 5:
            notes += transport.messages()
        return notes

    first, second = LoopbackWorld(2, delay=delay).run(program)
    assert first == [(1, b"%d" % number) for number in range(5)]
    assert second == [(0, b"%d" % number) for number in range(5)]


def test_a_killed_rank() -> None:
    world = LoopbackWorld(3, hosts=("a", "a", "b"))

    def program(transport: LoopbackTransport) -> str:
        finish(transport.allreduce(np.zeros(1), "sum"))
        if transport.rank == 1:
            world.kill(1)
            with pytest.raises(RankKilled):
                transport.post(0, b"")
            with pytest.raises(RankKilled):
                transport.messages()
            transport.allreduce(np.zeros(1), "sum")
            raise AssertionError("not reached")
        while transport.state(1) != "gone":
            pass
        return transport.state(2 - transport.rank)

    assert world.run(program) == ["unknown", None, "unknown"]


def test_errors_and_hangs_come_out() -> None:
    def fails(transport: LoopbackTransport) -> None:
        if transport.rank == 1:
            raise ValueError("from rank 1")

    with pytest.raises(ValueError, match="from rank 1"):
        LoopbackWorld(2).run(fails)

    world = LoopbackWorld(2)

    def hangs(transport: LoopbackTransport) -> None:
        if transport.rank == 0:
            finish(transport.allreduce(np.zeros(1), "sum"))

    with pytest.raises(TimeoutError, match="rank 0 still running"):
        world.run(hangs, timeout=0.1)
    world.kill(0)  # ends its thread


def test_a_process_of_its_own() -> None:
    transport = SingleTransport()
    assert (transport.rank, transport.size, transport.window) == (0, 1, None)
    with pytest.raises(NotImplementedError, match="cannot start an exchange"):
        transport.allreduce(np.zeros(1), "sum")
