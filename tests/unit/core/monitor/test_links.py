"""The link between the monitors of two hosts."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest

from ringdance.core.monitor.links import Clock, Follower, Sender
from ringdance.core.ring import Kind, Ring, RingReader, Who, records
from ringdance.host.system import tcp

TOKEN = bytes(range(32))


def link() -> tuple[Follower, Sender]:
    listener = tcp.listen()
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(tcp.accept(listener, TOKEN)))
    thread.start()
    sender = Sender(["127.0.0.1"], listener.getsockname()[1], TOKEN.hex())
    thread.join()
    listener.close()
    assert accepted[0]
    return Follower(accepted[0]), sender


def test_records_and_labels_come_over() -> None:
    follower, sender = link()
    ring = Ring()
    ring.describe(5, 8, "node2")
    reader = RingReader(ring.memory)
    for name in ("a", "b", "a"):
        ring.add(Kind.SUBMIT, ring.label(name))
        sender.send(reader)
    ring.add(Kind.BATCH, ring.label(("a", "b")))
    sender.send(reader)
    # The host's clock is not known yet, so the sender answers clock requests before it ends.
    ending = threading.Thread(target=sender.finish, args=[10.0])
    began = time.monotonic()
    ending.start()
    while follower.receive():
        follower.check_clock()
        time.sleep(0.001)
    ending.join()
    assert time.monotonic() - began < 5.0
    assert follower.stopped
    assert follower.clock.known
    assert not follower.frames.send({"do": "stop"})
    got = follower.rings[5]
    assert got.who == Who(5, "node2", reader.who.pid)
    received = [record for first, data, _ in got.taken for record in records(first, data)]
    assert [got.name(record.label) for record in received] == ["a", "b", "a", ("a", "b")]


def test_the_distance_of_two_clocks_is_found_through_slow_round_trips() -> None:
    clock, ahead = Clock(), 5_000_000_000
    for number in range(12):
        question = clock.ask()
        if number != 4:
            time.sleep(0.02)  # a late answer, so this round trip says little about the offset
        clock.answer(question["sent"], time.monotonic_ns() + ahead)
    assert clock.known
    assert abs(clock.ahead(time.monotonic_ns() + ahead) - ahead) < 2_000_000


@pytest.mark.parametrize("ppm", [30, -30, 0])
def test_clocks_that_drift_apart_for_an_hour(ppm: int) -> None:
    """The true offset is within the uncertainty, which is about as small as short round trips allow."""
    random = Random(1)
    clock, rate = Clock(), ppm * 1e-6

    def theirs(now: int) -> int:
        return now + 7_000_000_000_000 + round(rate * now)

    now, bounds = 10**9, []
    for second in range(3600):
        for _ in range(8 if second == 0 else 1):
            there, back = (round(30_000 + random.expovariate(1 / 100_000)) for _ in range(2))  # nanoseconds
            clock.answer(now, theirs(now + there), now + there + back)
        for later in (0, 900_000_000):  # until the next round trip
            at = now + later
            error = abs(clock.ahead(theirs(at)) - (theirs(at) - at))
            assert error <= clock.uncertainty
        bounds.append(clock.uncertainty)
        now += 10**9
    assert sorted(bounds)[len(bounds) // 2] < 100_000
    assert max(bounds) < 500_000


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("change", [0.0, 5e-6])
def test_one_way_becomes_slow_and_the_rate_changes(way: int, change: float) -> None:
    """Under a training run's own traffic, round trips are fast at first, then only uneven."""
    random, clock = Random(2), Clock()
    now, ahead = 10**9, 7e12
    for second in range(300):
        for _ in range(8 if second == 0 else 1):
            trip = [25_000, 25_000]
            trip[way] += random.randint(1_500_000, 2_500_000) * (30 < second < 200)
            clock.answer(now, now + trip[0] + round(ahead), now + sum(trip))
            error = abs(clock.ahead(now + trip[0] + round(ahead)) - ahead)
            assert error <= clock.uncertainty
            now += 100_000
        now += 10**9
        ahead += (10e-6 + change * (second > 100)) * 1e9
    assert clock.uncertainty < 50_000
    ahead -= 3e9  # the host was suspended
    clock.answer(now, now + 25_000 + round(ahead), now + 50_000)
    assert abs(clock.ahead(now + 25_000 + round(ahead)) - ahead) <= clock.uncertainty < 200_000


def test_questions_about_the_clock_are_answered() -> None:
    follower, sender = link()
    while not follower.clock.known:
        follower.check_clock()
        assert sender.commands() in (([], True),)
        follower.receive()
    assert abs(follower.clock.ahead(time.monotonic_ns())) < 50_000_000
    follower.frames.send({"do": "start", "detail": 1, "anew": True})
    commands: list[dict[str, object]] = []
    while not commands:
        commands, _ = sender.commands()
    assert commands == [{"do": "start", "detail": 1, "anew": True}]
    follower.sock.close()
    while sender.commands()[1]:
        time.sleep(0.001)
    sender.sock.close()
