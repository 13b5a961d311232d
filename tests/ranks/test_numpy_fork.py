"""A forked child, such as a DataLoader worker, knows its rank and cannot harm its parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.core.ring import Word
from ringdance.training import session

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def in_child(call: Callable[[], Any]) -> str:
    """Return what ``call`` returns or raises in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = str(call())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_child_knows_its_rank() -> None:
    def ask() -> list[Any]:
        return [hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()]

    assert in_child(ask) == str(ask())


@pytest.mark.ranks(2, 3, 4)
def test_a_child_takes_no_part() -> None:
    ones = np.ones(100_000, np.float32)
    handle = hvd.allreduce(ones, op=hvd.Sum, name="from before", wait=False) if RANK == 0 else None
    for call in (
        lambda: hvd.allreduce(ones, name="from before"),
        lambda: hvd.allreduce(ones, name="from before", wait=False),
        lambda: hvd.synchronize(handle) if handle is not None else hvd.barrier(),
        lambda: hvd.add_process_set([0]),
    ):
        text = in_child(call)
        assert text.startswith("NotInitializedError"), text
        assert f"was forked from rank {RANK}" in text
    assert in_child(hvd.shutdown) == "None"
    hvd.barrier()  # no exchange before all children have asked: a child may fetch completed results
    if handle is None:
        handle = hvd.allreduce(ones, op=hvd.Sum, name="from before", wait=False)
    assert (hvd.synchronize(handle) == SIZE).all()


def test_a_child_leaves_the_records_of_its_parent_alone() -> None:
    hvd.mark_step()

    def end() -> None:
        hvd.mark_step()
        hvd.shutdown()

    words = session.engine().recorder.words
    before = words[Word.STEPS], words[Word.CLOSED]
    assert in_child(end) == "None"
    assert (words[Word.STEPS], words[Word.CLOSED]) == before
    assert hvd.metrics()["steps"] == before[0]


@pytest.mark.ranks(2, 3, 4)
def test_a_child_cannot_join_the_job() -> None:
    def begin() -> None:
        hvd.shutdown()
        hvd.init()  # as at the top of a script that a loader's worker imports
        assert hvd.size() > 1
        hvd.barrier()

    assert in_child(begin).startswith("NotInitializedError: This process")
    hvd.barrier()
