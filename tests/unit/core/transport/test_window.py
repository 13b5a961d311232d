"""The window's layout, its counters and its event count, between threads and between processes."""

from __future__ import annotations

import mmap
import os
import threading
import time

import numpy as np
import pytest

from ringdance.core.transport.eventcount import EventCount, process_state
from ringdance.core.transport.window import Window, window_size


def windows(members: int, vector: int = 40, buffer: int = 1000) -> list[Window]:
    memory = np.zeros(window_size(members, vector, buffer) // 8, np.int64).view(np.uint8)
    return [Window(memory, i, members, vector, buffer, lambda: None) for i in range(members)]


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize(("vector", "buffer"), [(1, 1), (64, 4096), (65, 4097), (200, 100_000)])
def test_parts_do_not_overlap(members: int, vector: int, buffer: int) -> None:
    """Fill each part with its own number. All parts must be intact at the end, and the counters untouched."""
    held = windows(members, vector, buffer)
    parts = [np.frombuffer(part, np.uint8) for parity in held[0].vectors for part in parity]
    parts += [part for parity in held[0].buffers for part in parity]
    assert all(part.size >= vector for part in parts[: 2 * members])
    assert all(part.size == buffer for part in parts[2 * members :])
    for number, part in enumerate(parts):
        part[:] = number + 1
    for number, part in enumerate(parts):
        assert (part == number + 1).all()
    assert not held[0].memory[: 64 * members].any()


def test_all_see_the_same_memory() -> None:
    first, second = windows(2)
    first.buffers[1][0][:3] = (1, 2, 3)
    assert second.buffers[1][0][:3].tolist() == [1, 2, 3]
    first.vectors[0][0][:2] = b"ab"
    assert bytes(second.vectors[0][0][:2]) == b"ab"


def test_reached_waits_for_all() -> None:
    first, second, third = windows(3)
    first.signal()
    assert not first.reached()
    assert first.missing() == [1, 2]
    assert second.peer_ahead()
    second.signal()
    assert not second.peer_ahead()
    assert not first.reached()
    assert first.missing() == [2]
    third.signal()
    assert first.reached()
    assert second.reached()
    assert third.reached()
    assert first.missing() == []
    third.signal()  # this member is already one exchange ahead
    assert third.missing() == [0, 1]
    assert first.reached()
    assert first.peer_ahead()


def test_a_sleeper_is_woken_by_a_signal() -> None:
    sleeping, other = windows(2)
    woken = threading.Event()

    def sleeper() -> None:
        sleeping.signal()
        while not sleeping.reached():
            seen = sleeping.event_count.prepare_wait()
            if sleeping.reached():
                sleeping.event_count.cancel_wait()
                break
            sleeping.event_count.wait(seen, 0.02)
        woken.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    time.sleep(0.03)
    assert not woken.is_set()
    other.signal()
    assert woken.wait(10)
    thread.join()


def test_a_notification_before_the_wait_is_not_lost() -> None:
    """A wait ends at once if notified after ``prepare_wait()``. Otherwise the test exceeds its time limit."""
    waiting, notifying = windows(2)
    for _ in range(5000):
        seen = waiting.event_count.prepare_wait()
        notifying.event_count.notify(0)
        waiting.event_count.wait(seen, 0.02)
        assert waiting.event_count.prepare_wait() != seen


def test_event_count_of_a_parent_window() -> None:
    """A subset's window uses the event count of the whole host, because a rank can wait on one only."""
    parents = windows(3)
    memory = np.zeros(window_size(2, 8, 8) // 8, np.int64).view(np.uint8)
    child = Window(memory, 0, 2, 8, 8, lambda: None, shared=(parents[0].event_count, [0, 2]))
    assert child.event_count is parents[0].event_count
    seen = parents[2].event_count.prepare_wait()
    child.signal()
    assert parents[2].event_count.prepare_wait() != seen


def test_between_processes() -> None:
    """A forked child and its parent synchronize a thousand times, and each reads the other's data."""
    size = window_size(2, 8, 64)
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)

    def exchange(index: int) -> bool:
        window = Window(memory, index, 2, 8, 64, lambda: None)
        for number in range(1000):
            window.buffers[number % 2][index][:8].view(np.int64)[0] = 10 * number + index
            window.signal()
            while not window.reached():
                window.event_count.wait(window.event_count.prepare_wait(), 0.001)
            if window.buffers[number % 2][1 - index][:8].view(np.int64)[0] != 10 * number + 1 - index:
                return False
        return True

    child = os.fork()
    if child == 0:
        os._exit(0 if exchange(1) else 1)
    fine = exchange(0)
    assert os.waitpid(child, 0)[1] == 0
    assert fine


def test_event_count_waits_no_longer_than_it_may() -> None:
    words = memoryview(np.zeros(32, np.int32))
    count = EventCount(words, np.frombuffer(words, np.int32).ctypes.data, 16, 1)
    count.wait(count.prepare_wait(), 5.0)  # at most 20 ms, so that a missed flag does no harm
    assert words[17] == 0


def test_states_of_processes() -> None:
    assert process_state(os.getpid()) == "running"
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        os.kill(child, 19)  # SIGSTOP
        while process_state(child) != "stopped":
            time.sleep(0.001)
    finally:
        os.kill(child, 9)
    while process_state(child) != "gone":  # a zombie counts as gone
        time.sleep(0.001)
    os.waitpid(child, 0)
    assert process_state(child) == "gone"
