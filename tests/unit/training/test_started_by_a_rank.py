"""A process that a rank has started is not a rank: its ``init()`` joins nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import ringdance.numpy
from ringdance.errors import NotInitializedError
from ringdance.settings.names import STARTED_BY
from ringdance.training import basics, session, startup


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Set the environment that the children of rank 2 of 4 inherit, and restore it afterwards."""
    inherited = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "a", "RANK": "2"}
    for name, value in (inherited | {STARTED_BY: "null"}).items():
        monkeypatch.setenv(name, value)
    yield monkeypatch
    session.shutdown()


def mark(by_mpi: bool = True, size: int = 4) -> None:
    place = {"local_rank": 0, "local_size": 2, "cross_rank": 1, "cross_size": 2}
    engine: Any = SimpleNamespace(rank=2 if size > 1 else 0, size=size, **place)
    startup.mark_children(engine, by_mpi)


def test_a_child_answers_for_its_rank_and_refuses_collectives(environ: pytest.MonkeyPatch) -> None:
    mark()
    assert startup.ParentRank.find() is None  # the rank itself
    rank = os.getpid()
    environ.setattr(os, "getpid", lambda: rank + 1)
    basics.init()
    place = basics.rank(), basics.size(), basics.local_rank(), basics.local_size(), basics.cross_rank()
    assert (*place, basics.cross_size()) == (2, 4, 0, 2, 1, 2)
    text = rf"\(pid {rank + 1}\) was started by rank 2 .*pid {rank}\)"
    with pytest.raises(NotInitializedError, match=text):
        session.engine().add_process_set([0, 1])
    session.shutdown()

    def make(**words: Any) -> Any:
        raise AssertionError("it must not connect to the ranks")

    with pytest.raises(NotInitializedError, match="was started by rank 2"):
        session.init(transport=(4, make))
    assert not session.is_initialized()


@pytest.mark.parametrize(
    ("by_mpi", "name", "another_job"),
    [(True, "PMIX_NAMESPACE", True), (True, "OMPI_COMM_WORLD_RANK", True), (True, "RANK", False),
     (False, "RANK", True), (False, "PMIX_NAMESPACE", False)],
)  # fmt: skip
def test_a_rank_of_another_job_is_one(
    environ: pytest.MonkeyPatch, by_mpi: bool, name: str, another_job: bool
) -> None:
    """The launcher of another job, which a rank may have started, sets other values."""
    mark(by_mpi)
    rank = os.getpid()
    environ.setattr(os, "getpid", lambda: rank + 1)
    environ.setenv(name, "7")
    assert (startup.ParentRank.find() is None) == another_job


def test_a_job_of_one_process_leaves_its_children_alone(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("OMPI_COMM_WORLD_SIZE", "1")
    mark(size=4)
    mark(size=1)
    assert STARTED_BY not in os.environ


def test_a_child_of_a_rank_in_a_job_of_its_own_does_not_join_the_launched_one(
    environ: pytest.MonkeyPatch,
) -> None:
    """After ``init(comm=[rank])``, a child inherits the settings of rank 2 of 4, but joins no other rank."""
    mark(size=4)
    mark(size=1)
    rank = os.getpid()
    environ.setattr(os, "getpid", lambda: rank + 1)
    basics.init()
    assert (basics.rank(), basics.size()) == (0, 1)
    assert float(ringdance.numpy.allreduce(numpy.ones(()))) == 1  # with no other rank
