"""A job can leave and start again any number of times, and nothing of earlier jobs remains."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import CollectiveError, EngineError
from ringdance.training import elastic, session

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def resources() -> tuple[int, int, int]:
    """Return this process's numbers of descriptors, threads and shared-memory mappings."""
    with open("/proc/self/maps") as file:
        shared = sum("/dev/shm" in line for line in file)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), shared


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_restarting_leaves_nothing_behind() -> None:
    before: list[tuple[int, int, int]] = []
    for _ in range(23):
        hvd.allreduce(np.ones(3, np.float32), name=f"never complete {RANK}", wait=False)
        assert hvd.allreduce(np.ones(300_000, np.float32), op=hvd.Sum)[-1] == SIZE
        if SIZE > 2:
            hvd.add_process_set([0, 1])
        before.append(resources())
        elastic.restart()
    most = [max(column) for column in zip(*before[2:8], strict=True)]
    assert all(now <= then for now, then in zip(before[-1], most, strict=True)), before
    assert not [thread for thread in threading.enumerate() if "set-up" in thread.name]


@pytest.mark.ranks(2, 3, 4)
def test_what_may_still_be_written_to_lives_after_a_failure_and_nothing_else() -> None:
    """MPI cannot cancel a posted operation, so it keeps writing to the buffers of a failed engine."""

    def fail() -> tuple[weakref.ref[Any], ...]:
        engine, buffer = session.engine(), np.zeros(1000)
        references = weakref.ref(buffer), weakref.ref(engine)
        if RANK == 0:
            engine.transport.allreduce(buffer, "sum")  # only on this rank
            engine._exclusively(engine.end.fail, EngineError("planted"))
        with pytest.raises(CollectiveError, match="planted"):
            hvd.allreduce(np.ones(300_000, np.float32))
        return references

    buffer, engine = fail()
    elastic.restart()
    gc.collect()
    assert (buffer() is not None) == (RANK == 0)
    assert engine() is None
    assert hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum)[0] == SIZE


@pytest.mark.ranks(2, 3, 4)
def test_after_a_failure_that_nobody_agreed_on() -> None:
    """One rank's engine fails in the middle of the others' work, and the job can restart."""
    for number in range(3):
        assert hvd.allreduce(np.ones(300_000, np.float32), op=hvd.Sum)[-1] == SIZE
        if number % SIZE == RANK:
            engine = session.engine()
            engine._exclusively(engine.end.fail, EngineError("planted"))
        with pytest.raises(CollectiveError, match="planted"):
            hvd.allreduce(np.ones(300_000, np.float32))
        assert session.engine().end.broken is not None
        elastic.restart()
    assert hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum)[0] == SIZE
