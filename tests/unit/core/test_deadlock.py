"""Ranks that wait for each other's operations get an error. Ranks that may still continue do not."""

from __future__ import annotations

import ctypes
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from loopback_job import bind, job

import ringdance.numpy as hvd
from ringdance.core.engine import Engine
from ringdance.core.reports.procfs import wakeable
from ringdance.core.request import Collective, Description, Request, Work
from ringdance.errors import DeadlockError, ShutDownError
from ringdance.settings import Settings

SOON = 0.8
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc; other systems only warn")


def crossed(engine: Engine) -> None:
    for name in ("a", "b") if engine.rank else ("b", "a"):
        hvd.allreduce(np.ones(3), name=name)


def on_one_rank_only(engine: Engine) -> None:
    if engine.rank == 0:
        hvd.allreduce(np.ones(3), name="metric")
    for number in range(3):
        hvd.allreduce(np.ones(3), name=f"x{number}")


def other_collective(engine: Engine) -> None:
    (hvd.allgather if engine.rank else hvd.allreduce)(np.ones(3), name="same")


def around_sets(engine: Engine) -> None:
    """Each rank waits in a set for its neighbor, which waits in another set."""
    sets = [hvd.add_process_set([i, (i + 1) % 3]) for i in range(3)]
    hvd.barrier(sets[engine.rank])


def joined_beside_a_set(engine: Engine) -> None:
    pair = hvd.add_process_set([0, 1])
    if engine.rank == 1:
        hvd.allreduce(np.ones(3), name="more", process_set=pair)
    hvd.join()


@linux
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (joined_beside_a_set, ("'allreduce.more' in process set", "rank 0", "it has joined after")),
        (crossed, ("'allreduce.b'", "it is waiting for 'allreduce.a'", "rank 1", "in crossed")),
        (on_one_rank_only, ("'allreduce.metric'", "it is waiting for 'allreduce.x0'", "in on_one_rank_only")),
        (other_collective, ("'allreduce.same'", "it is waiting for 'allgather.same'")),
        (around_sets, ("in process set", "none of them can ever continue")),
    ],
)
def test_all_ranks_are_told(program: Callable[[Engine], None], words: tuple[str, ...]) -> None:
    messages = []

    def rank(engine: Engine) -> None:
        with pytest.raises(DeadlockError) as caught:
            program(engine)
        messages.append(str(caught.value))

    job(3, rank, Settings(stall_check_time=0.2, deadlock_time=SOON))
    assert len(messages) == 3
    for text in messages:
        assert all(word in text for word in words), text


def test_who_computes_may_go_on() -> None:
    """A rank that computes for longer than the deadlock time, with other work in flight, causes no error."""

    def program(engine: Engine) -> None:
        handle = hvd.allreduce(np.ones(3), name="x", wait=False) if engine.rank == 0 else None
        hvd.allreduce(np.ones(3), name="before")
        if handle is None:
            time.sleep(2.5 * SOON)
            handle = hvd.allreduce(np.ones(3), name="x", wait=False)
        hvd.synchronize(handle)

    job(2, program, Settings(stall_check_time=0.2, deadlock_time=SOON))


def test_others_go_on_in_a_set_of_their_own() -> None:
    """Two ranks may wait long while the others exchange in another set: each inquiry sees new progress."""

    def program(engine: Engine) -> None:
        pair = hvd.add_process_set([2, 3])
        if engine.rank >= 2:
            until = time.monotonic() + 4 * SOON
            while hvd.allreduce(np.array([time.monotonic() < until]), op=hvd.Min, process_set=pair)[0]:
                pass
        hvd.allreduce(np.ones(3), name="late")

    job(4, program, Settings(stall_check_time=0.2, deadlock_time=SOON))


def submit(engine: Engine, name: str) -> Work:
    description = Description(Collective.ALLREDUCE, ("float64",), ((3,),))
    return engine.submit(Request(description, (np.ones(3),), name=name))


def late_result(engine: Engine) -> None:
    """After long work, a thread of rank 0 that has never made a call submits what rank 1 is waiting for."""
    if engine.rank == 1:
        hvd.allreduce(np.ones(3), name="result")

    def evaluate() -> None:
        threading.Event().wait(2.5 * SOON)
        with bind(engine):
            hvd.allreduce(np.ones(3), name="result")

    thread = threading.Thread(target=evaluate)
    if engine.rank == 0:
        thread.start()
    hvd.allreduce(np.ones(3), name="done")
    if engine.rank == 0:
        thread.join()


def limited_wait(engine: Engine) -> None:
    """Rank 0 times out after a long wait, then submits what rank 1 is waiting for."""
    if engine.rank == 0:
        work = submit(engine, "late")
        with pytest.raises(TimeoutError):
            work.wait(2.5 * SOON)
        submit(engine, "early").wait()
        work.wait()
    else:
        submit(engine, "early").wait()
        submit(engine, "late").wait()


def one_of_two_gives_up(engine: Engine) -> None:
    """Two threads wait for the same ``Work``. The one that came last gives up before the end."""
    work = submit(engine, f"of {engine.rank}")
    thread = threading.Thread(target=work.wait)
    thread.start()
    time.sleep(0.1)
    with pytest.raises(TimeoutError):
        work.wait(0.1)
    time.sleep(2.5 * SOON)
    submit(engine, f"of {1 - engine.rank}").wait()
    thread.join()


@pytest.mark.parametrize("program", [late_result, limited_wait, one_of_two_gives_up])
def test_who_may_submit_later_is_waited_for(program: Callable[[Engine], None]) -> None:
    job(2, program, Settings(stall_check_time=0.1, deadlock_time=SOON))


def wait_in_c() -> None:
    """Wait for a sleeping C thread, the way a TensorFlow graph waits for its data."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(1))
    libc.pthread_join(thread, None)


@linux
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda held: held.acquire(), "sleeps"),
        (lambda held: held.acquire(timeout=1.0), ""),
        (lambda held: multiprocessing.get_context("spawn").Semaphore(0).acquire(timeout=1.0), ""),
        (lambda held: multiprocessing.get_context("spawn").Event().wait(1.0), ""),
        (lambda held: time.sleep(1.0), ""),
        (lambda held: subprocess.run(["sleep", "1"], check=True), ""),
        (lambda held: wait_in_c(), ""),
        (lambda held: sum(range(10_000_000)), "runs"),
    ],
)
def test_who_is_woken_by_threads_alone(call: Callable[[threading.Lock], object], expected: str) -> None:
    held, states = threading.Lock(), set()
    held.acquire()
    thread = threading.Thread(target=call, args=(held,))
    thread.start()
    while thread.is_alive() and expected not in states:
        states.add(wakeable(thread.native_id or 0)[1])
    held.release()
    thread.join()
    assert expected in states
    assert "sleeps" not in states or expected == "sleeps"


def test_zero_only_warns() -> None:
    messages: list[str] = []

    def program(engine: Engine) -> None:
        with pytest.raises(ShutDownError):
            crossed(engine)

    def ended(engine: Engine) -> None:
        threading.Timer(3 * SOON, lambda: engine.shutdown(timeout=0.1)).start()
        program(engine)

    job(2, ended, Settings(stall_check_time=0.2, deadlock_time=0.0), report=messages.append)
    assert any("Not submitted by" in text for text in messages)
