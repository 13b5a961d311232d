"""Overlapping process sets, and changes of sets that only some ranks make correctly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loopback_job import job

from ringdance.core.engine import Engine
from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.errors import RingdanceError


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("hosts", [None, ("a", "a", "b")])
def test_two_sets_waited_for_in_opposite_orders(threaded: bool, hosts: tuple[str, ...] | None) -> None:
    def program(engine: Engine) -> list[float]:
        other = engine.add_process_set([0, 1])
        values_seen = []
        for step in range(20):
            works = []
            for set_id in (0, other):
                if engine.rank in engine.members(set_id):
                    values = np.full(3, float(step + engine.rank))
                    description = Description(Collective.ALLREDUCE, ("float64",), ((3,),), ReduceOp.SUM)
                    request = Request(description, (values,), name="x", set_id=set_id)
                    works.append(engine.submit(request, wake=False))
            order = works if engine.rank == 0 else works[::-1]
            for work in order:
                work.wait(20.0)
            values_seen += [float(work.result[0][0]) for work in works]
        return values_seen

    for rank, values_seen in enumerate(job(3, program, hosts=hosts, threaded=threaded)):
        both = [[3 * step + 3.0, 2 * step + 1.0] for step in range(20)]
        assert values_seen == [value for pair in both for value in pair[: 2 if rank < 2 else 1]]


def attempt(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except RingdanceError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_wrong_change_of_sets_on_one_rank(culprit: int, threaded: bool) -> None:
    """The other ranks learn of the error and which rank caused it. An immediate next call succeeds."""

    def program(engine: Engine) -> list[str]:
        wrong = engine.rank == culprit
        results = [attempt(lambda: engine.add_process_set([0, 3] if wrong else [0, 1]))]
        results.append(attempt(lambda: engine.add_process_set([0, 1])))
        results.append(attempt(lambda: engine.remove_process_set(7 if wrong else 1)))
        results.append(attempt(lambda: engine.remove_process_set(1)))
        return results

    for rank, (added, number, removed, none) in enumerate(job(3, program, threaded=threaded)):
        assert number == "1"
        assert none == "None"
        if rank == culprit:
            assert added.startswith("ArgumentError: ")
            assert removed.startswith("ArgumentError: Process set 7 does not exist")
        else:
            assert f"rank {culprit} on host" in added
            assert "but got [0, 3]. This job has the ranks 0 to 2" in added
            assert f"rank {culprit} on host" in removed
            assert "Process set 7 does not exist" in removed


def test_a_wrong_change_of_sets_on_all_ranks() -> None:
    def program(engine: Engine) -> list[str]:
        results = [attempt(lambda: engine.add_process_set([])) for _ in range(3)]
        return [*results, attempt(lambda: engine.add_process_set([0]))]

    for results in job(2, program):
        assert all("A process set must have at least one" in text for text in results[:3])
        assert results[3] == "1"


def test_no_change_of_sets_while_a_rank_has_joined() -> None:
    def program(engine: Engine) -> tuple[str, int]:
        text = ""
        if engine.rank == 0:
            text = attempt(lambda: engine.add_process_set([0]))
        engine.submit(Request(Description(Collective.JOIN))).wait()
        return text, engine.add_process_set([1])

    (error, number), (_, other) = job(2, program)
    assert "while some ranks have joined (rank 1" in error
    assert number == other == 1
