"""Names that never match are reported after some seconds, with both sides' names, ranks and source lines."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from by_numpy import same
from other_settings import other_settings

import ringdance.numpy as hvd
from ringdance.errors import ShutDownError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
several = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=["1", "0"])
def hasty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Warn after one second, with and without shared memory."""
    with other_settings({"RINGDANCE_STALL_CHECK_TIME": "1", "RINGDANCE_WINDOW": request.param}):
        yield


@pytest.fixture
def said() -> Iterator[list[str]]:
    texts: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    keeper = Keeper()
    logging.getLogger("ringdance").addHandler(keeper)
    yield texts
    logging.getLogger("ringdance").removeHandler(keeper)


def wait_for(found: list[str], words: str) -> str:
    """Wait for the first warning that contains these words, and return it."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        for text in list(found):
            if words in text:
                return text
        time.sleep(0.02)
    raise AssertionError(f"no warning with {words!r}, but {found}")


def reduce(name: str) -> None:
    """Like a user's helper function: all ranks wait at the same line, called from different lines."""
    same(hvd.allreduce(np.ones(3), name=name, op=hvd.Sum), np.full(3, float(SIZE)))


def train(name: str) -> None:
    reduce(name)


def evaluate(name: str) -> None:
    reduce(name)


@several
def test_disjoint_names_are_said_and_can_still_be_mended(hasty: None, said: list[str]) -> None:
    """After the warning, a second thread on each rank submits what the others wait for."""
    mine, other = ("this", "that") if RANK == 0 else ("that", "this")
    told = []

    def release() -> None:
        if RANK == 0:
            told.append(wait_for(said, "'allreduce.that'"))
        hvd.broadcast(np.ones(1), 0, name="release now")
        same(hvd.allreduce(np.ones(3), name=other, op=hvd.Sum), np.full(3, float(SIZE)))

    thread = threading.Thread(target=release)
    thread.start()
    (train if RANK == 0 else evaluate)(mine)
    thread.join()
    if RANK == 0:
        assert "has waited" in told[0]
        assert "'allreduce.this'" in told[0]
        assert f"rank {SIZE - 1} on host" in told[0]
        first, others = told[0].split("Not submitted by")
        for text, caller in ((first, "train"), (others, "evaluate")):
            assert "test_collectives_stall.py:" in text
            assert " in reduce, called from " in text
            assert f" in {caller}" in text.partition("called from")[2]


@several
def test_a_rank_that_computes_is_named_with_its_line(hasty: None, said: list[str]) -> None:
    directory = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))
    told = []

    def listen() -> None:
        told.append(wait_for(said, "it is not waiting for anything; its main thread computes, at "))
        (directory / "told").touch()

    if RANK == 0:
        threading.Thread(target=listen).start()
    while RANK == SIZE - 1 and not (directory / "told").exists():
        sum(range(1000))
    hvd.allreduce(np.ones(2), name="late")
    if RANK == 0:
        shutil.rmtree(directory)
        assert "'allreduce.late'" in told[0]
        assert f"rank {SIZE - 1} on host" in told[0]
        assert "test_collectives_stall.py:" in told[0]
        assert "test_a_rank_that_computes_is_named_with_its_line" in told[0]


@pytest.fixture
def late() -> Iterator[None]:
    with other_settings({"RINGDANCE_STALL_CHECK_TIME": "0.5"}):
        yield


@several
def test_threads_that_are_not_the_main_one_are_shown(late: None, said: list[str]) -> None:
    directory = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))

    def load() -> None:
        while not (directory / "told").exists():
            time.sleep(0.02)

    def train_in_thread() -> None:
        hvd.allreduce(np.ones(2), name="of a thread")

    if RANK == SIZE - 1:
        loader = threading.Thread(target=load, name="loader")
        loader.start()
        loader.join()
    trainer = threading.Thread(target=train_in_thread, name="trainer")
    trainer.start()
    text = ""
    if RANK == 0:
        try:
            text = wait_for(said, "its thread 'loader' sleeps, at ")
        finally:
            (directory / "told").touch()
    trainer.join()
    if RANK == 0:
        shutil.rmtree(directory)
        own, _, other = text.partition("Not submitted by")
        assert "(its thread 'trainer' is at " in own
        assert re.search(" in train_in_thread; its main thread (sleeps|computes), at ", own), own  # it polls
        assert "its thread 'loader' sleeps, at " in other
        assert " in load" in other


@several
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_holds_pythons_lock_is_seen_from_outside(late: None, said: list[str]) -> None:
    if RANK == SIZE - 1:
        ctypes.PyDLL(None).usleep(3_000_000)  # PyDLL, unlike CDLL, holds the lock
    hvd.allreduce(np.ones(2), name="after the call")
    if RANK == 0:
        text = wait_for(said, "'allreduce.after the call'")
        assert f"No answer from rank {SIZE - 1} on host" in text
        assert "its main thread sleeps, probably in a call that holds the GIL, at " in text
        assert "test_collectives_stall.py:" in text
        assert "in test_a_rank_that_holds_pythons_lock_is_seen_from_outside" in text


@several
def test_a_stopped_rank_is_named(late: None, said: list[str]) -> None:
    pids = hvd.allgather_object(os.getpid())
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGSTOP)

    def go_on() -> None:
        wait_for(said, f"`kill -CONT {pids[-1]}` resumes it")
        os.kill(pids[-1], signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    if RANK == 0:
        thread.start()
    hvd.allreduce(np.ones(2), name="after the stop")
    if RANK == 0:
        thread.join()
        assert f"No answer from rank {SIZE - 1} on host" in said[0]


@several
def test_what_is_marked_is_no_stall_until_its_timeout(late: None, said: list[str]) -> None:
    hvd.barrier()
    with hvd.pause_stall_check("epoch"), hvd.pause_stall_check("evaluation"):
        time.sleep(1.5 * (RANK == SIZE - 1))
    hvd.allreduce(np.ones(2), name="after the evaluation")
    assert said == []
    if RANK == SIZE - 1:
        with hvd.pause_stall_check("export", timeout=0.1):
            time.sleep(1.5)
    hvd.allreduce(np.ones(2), name="after the export")
    if RANK == 0:
        assert "it is in a block marked 'export'; it is not waiting" in said[0]
        assert "its main thread sleeps, at " in said[0]
        report = json.loads(Path(said[0].rpartition("(Details and stacks: ")[2][:-1]).read_text())
        assert report["name"] == "allreduce.after the export"
        assert report["culprits"] == [SIZE - 1]
        assert report["ranks"][-1]["paused"] == "export"
        assert "test_collectives_stall.py" in report["ranks"][-1]["threads"][0]["frames"][0]


@several
def test_join_is_not_a_stall(hasty: None, said: list[str]) -> None:
    if RANK == 0:
        time.sleep(1.8)
    hvd.join()
    assert not any("has waited" in text for text in said)


@several
def test_the_reason_of_a_stop_reaches_a_long_wait(hasty: None) -> None:
    if RANK == 0:
        time.sleep(1.5)
        hvd.shutdown()
    else:
        with pytest.raises(ShutDownError, match="rank 0 on host"):
            hvd.allreduce(np.ones(2), name="no other rank")
        hvd.shutdown()
    hvd.init()
