"""Names that never match: said after some seconds, with both sides' names, ranks and lines of code."""

from __future__ import annotations

import logging
import shutil
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
    """Warnings after a second; with shared memory and without."""
    with other_settings({"RINGDANCE_STALL_CHECK_TIME": "1", "RINGDANCE_WINDOW": request.param}):
        yield


@pytest.fixture
def said() -> Iterator[list[str]]:
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keeper = Keeper()
    logging.getLogger("ringdance").addHandler(keeper)
    yield found
    logging.getLogger("ringdance").removeHandler(keeper)


def wait_for(found: list[str], words: str) -> str:
    """Return the first warning with these words, once it has come."""
    while True:
        for text in list(found):
            if words in text:
                return text
        time.sleep(0.02)


@several
def test_disjoint_names_are_said_and_can_still_be_mended(hasty: None, said: list[str]) -> None:
    """After the warning a second thread on each rank submits what the others wait for."""
    mine, other = ("this", "that") if RANK == 0 else ("that", "this")
    told = []

    def mend() -> None:
        if RANK == 0:
            told.append(wait_for(said, "'allreduce.that'"))
        hvd.broadcast(np.ones(1), 0, name="mend now")
        same(hvd.allreduce(np.ones(3), name=other, op=hvd.Sum), np.full(3, float(SIZE)))

    thread = threading.Thread(target=mend)
    thread.start()
    same(hvd.allreduce(np.ones(3), name=mine, op=hvd.Sum), np.full(3, float(SIZE)))
    thread.join()
    if RANK == 0:
        assert "has waited" in told[0]
        assert "'allreduce.this'" in told[0]
        assert f"rank {SIZE - 1} on host" in told[0]
        assert "test_verbs_stall.py:" in told[0]


@several
def test_a_rank_that_computes_is_named_with_its_line(hasty: None, said: list[str]) -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))
    told = []

    def listen() -> None:
        told.append(wait_for(said, "it does not wait for anything; its main thread is at"))
        (folder / "told").touch()

    if RANK == 0:
        threading.Thread(target=listen).start()
    while RANK == SIZE - 1 and not (folder / "told").exists():
        sum(range(1000))
    hvd.allreduce(np.ones(2), name="late")
    if RANK == 0:
        shutil.rmtree(folder)
        assert "'allreduce.late'" in told[0]
        assert f"rank {SIZE - 1} on host" in told[0]
        assert "test_verbs_stall.py:" in told[0]
        assert "test_a_rank_that_computes_is_named_with_its_line" in told[0]


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
            hvd.allreduce(np.ones(2), name="nobody else")
        hvd.shutdown()
    hvd.init()
