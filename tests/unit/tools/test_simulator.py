"""The simulator: checked by hand, against the loopback, and by laws that hold for every machine."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from loopback import LoopbackTransport
from loopback_job import world_for
from sampled import sampled

from ringdance.core.exchange import Context, exchange_for
from ringdance.core.exchange.arithmetic import reduction
from ringdance.core.request import ReduceOp
from ringdance.settings import Settings
from ringdance.tools.plan.network import allreduce_traffic
from ringdance.tools.plan.simulator import Machine, simulate

FREE = Machine(
    bandwidth=1e9, latency=1e-3, memory_bandwidth=inf,
    message_seconds=0.0, chunk_seconds=0.0, round_seconds=0.0,
)  # fmt: skip
"""A machine whose links alone take time."""
SIZES = (1 << 20, 300_000, 64, 2 << 20, 40_000, 4)  # bytes, as float32


def gradients(total: int = 0, ready: float = 0.0) -> list[tuple[int, float]]:
    return [(total, ready)] if total else [(nbytes, ready) for nbytes in SIZES]


def test_one_chunk_between_two_hosts_by_hand():
    # The computation is done after 0.1 s and waits for 500,000 bytes. Two rounds of a tree agree. Half of the
    # chunk goes to its owner, and the sums come back.
    step = simulate(FREE, 2, 1, gradients(500_000, 0.1), 0.1)
    vector = step.calls[0][1]
    agreed = 2 * (1e-3 + vector / 1e9)
    assert step.seconds == pytest.approx(0.1 + agreed + 2 * (250_000 / 1e9 + 1e-3), abs=1e-9)
    assert step.exposed_seconds == pytest.approx(step.seconds - 0.1)
    assert step.efficiency == pytest.approx(0.1 / step.seconds)
    assert step.calls[1:] == (("alltoall", 500_000), ("allgather", 500_000))
    assert (step.sent_bytes, step.messages) == (500_000 + vector, 3)


def test_a_core_is_busy_for_messages_and_copies():
    # As above, but a core needs 1 ms to send or receive a message, and 1 ms for 100,000 bytes. The whole
    # chunk is packed and unpacked (divided on the way), and half of it is reduced. MPI twice copies half of
    # it from the rank to itself, the first time while the other half is on its way.
    busy = replace(FREE, message_seconds=1e-3, memory_bandwidth=1e8)
    extra = simulate(busy, 2, 1, gradients(500_000, 0.1), 0.1).seconds
    extra -= simulate(FREE, 2, 1, gradients(500_000, 0.1), 0.1).seconds
    messages, copies = 4e-3 + 2 * 2e-3, (500_000 + 500_000 + 250_000) / 1e8
    assert messages + copies - 3e-3 < extra < messages + copies + 2 * 250_000 / 1e8 + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 1), (2, 8), (3, 2), (5, 4), (16, 8), (24, 1), (24, 8)])
def test_a_host_sends_what_an_allreduce_needs(hosts, ranks, dtype):
    nbytes = 32 << 20
    step = simulate(FREE, hosts, ranks, gradients(nbytes), 0.01, wire_dtype=dtype)
    on_wire = nbytes if dtype == "float32" else nbytes // 2
    assert on_wire <= step.sent_bytes <= 1.1 * 2 * on_wire * (hosts - 1) / hosts
    assert step.seconds >= 2 * (hosts - 1) / hosts * on_wire / FREE.bandwidth


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 1), (2, 2), (3, 2), (4, 4)])
def test_one_host_stands_for_all(hosts, ranks):
    machine = Machine(1e9)
    single = simulate(machine, hosts, ranks, gradients(8 << 20), 0.01)
    every = simulate(machine, hosts, ranks, gradients(8 << 20), 0.01, all_hosts=True)
    assert single.seconds == pytest.approx(every.seconds, rel=1e-3)
    assert single.sent_bytes == pytest.approx(every.sent_bytes, rel=1e-3)
    assert (single.messages, single.rounds, single.calls) == (every.messages, every.rounds, every.calls)


WORLDS = [(1, 4), (2, 1), (2, 4), (3, 2), (8, 1)]


@pytest.mark.parametrize("world", sampled("calls of the simulator", WORLDS, 2), ids=str)
def test_calls_are_those_of_a_real_exchange(world, monkeypatch):
    hosts, ranks = world
    calls = defaultdict(list)

    def watched(name):
        original = getattr(LoopbackTransport, name)

        def call(self, buffer, *others):
            nbytes = buffer.nbytes * (self.size if name == "allgather" else 1)
            calls[threading.current_thread().name].append((name, nbytes))
            return original(self, buffer, *others)

        return call

    for name in ("alltoall", "allgather", "allreduce"):
        monkeypatch.setattr(LoopbackTransport, name, watched(name))
    settings = Settings()

    def program(transport):
        exchange = exchange_for(transport, settings.chunk_bytes, settings.small_bytes, Context())
        views = [np.ones(nbytes // 4, np.float32) for nbytes in SIZES]
        how = reduction("float32", ReduceOp.AVERAGE, 1.0, 1.0, transport.size)
        for _ in exchange.allreduce(views, views, how):
            pass
        return float(views[0][0])

    names = [f"h{host}" for host in range(hosts) for _ in range(ranks)]
    assert world_for(settings, hosts * ranks, names).run(program) == [1.0] * (hosts * ranks)
    step = simulate(Machine(1e9), hosts, ranks, gradients(), 0.01, all_hosts=True)
    agreement = 1 if hosts > 1 else 0
    assert step.rounds == 1
    assert list(step.calls[agreement:]) == calls["rank 0"]


def test_more_latency_is_never_faster_and_more_bandwidth_never_slower():
    def seconds(**machine):
        return simulate(replace(FREE, **machine), 4, 2, gradients(), 1e-3).seconds

    rising = [seconds(latency=latency) for latency in (0.0, 1e-5, 1e-4, 1e-2)]
    assert rising == sorted(rising)
    rising = [seconds(bandwidth=bandwidth) for bandwidth in (1e10, 1e9, 1e8)]
    assert rising == sorted(rising)
    rising = [seconds(message_seconds=each) for each in (0.0, 1e-6, 1e-4)]
    assert rising == sorted(rising)


def test_gradients_that_are_ready_early_are_hidden():
    early = [(1 << 20, 0.01 * i) for i in range(10)]
    step = simulate(FREE, 2, 1, early, 0.2)
    assert (step.exposed_seconds, step.efficiency, step.rounds) == (0.0, 1.0, 10)
    assert simulate(FREE, 2, 1, [(10 << 20, 0.2)], 0.2).exposed_seconds > (10 << 20) / 1e9


def test_gradients_may_come_in_any_order_and_after_the_computation():
    late = simulate(FREE, 2, 2, [(400, 0.2), (4000, 0.1)], 0.1)
    assert late.rounds == 2
    assert late.seconds == simulate(FREE, 2, 2, [(4000, 0.1), (400, 0.2)], 0.1).seconds > 0.2


def test_ranks_that_share_cores_lose_time():
    shared = replace(FREE, ranks_per_core=2.0)
    assert simulate(shared, 2, 1, gradients(), 0.1).exposed_seconds >= shared.turn
    assert simulate(FREE, 1, 1, [], 0.1).seconds == 0.1


def test_what_mpi_sends_adds_up():
    for members in (4, 6, 24):
        for nbytes in (4096, 1 << 20):
            parts = [allreduce_traffic(members, rank, nbytes, False)[:2] for rank in range(members)]
            assert sum(sent for sent, _ in parts) >= 2 * (members - 1) * nbytes * 0.99
            assert parts[0][0] == max(sent for sent, _ in parts)
    assert allreduce_traffic(24, 0, 1 << 20, False)[0] / (1 << 20) == pytest.approx(3.375)
    assert allreduce_traffic(1, 0, 100, True) == (0, 0, 0, 0)


def test_27200_ranks():
    step = simulate(Machine(25e9 / 8), 3400, 8, [(102_228_128, 0.1)], 0.1)
    assert step.seconds > 0.1
    assert step.messages > 3400
