"""Sets that overlap, waited for in different orders."""

from __future__ import annotations

import numpy as np
import pytest
from loopback_job import job

from ringdance.core.engine import Engine
from ringdance.core.request import Description, Operation, Request, Verb


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("hosts", [None, ("a", "a", "b")])
def test_two_sets_waited_for_in_opposite_orders(threaded: bool, hosts: tuple[str, ...] | None) -> None:
    def program(engine: Engine) -> list[float]:
        other = engine.add_process_set([0, 1])
        found = []
        for step in range(20):
            tickets = []
            for set_id in (0, other):
                if engine.rank in engine.members(set_id):
                    values = np.full(3, float(step + engine.rank))
                    description = Description(Verb.ALLREDUCE, ("float64",), ((3,),), Operation.SUM)
                    request = Request(description, (values,), name="x", set_id=set_id)
                    tickets.append(engine.submit(request, wake=False))
            order = tickets if engine.rank == 0 else tickets[::-1]
            for ticket in order:
                ticket.wait(20.0)
            found += [float(ticket.result[0][0]) for ticket in tickets]
        return found

    for rank, found in enumerate(job(3, program, hosts=hosts, threaded=threaded)):
        both = [[3 * step + 3.0, 2 * step + 1.0] for step in range(20)]
        assert found == [value for pair in both for value in pair[: 2 if rank < 2 else 1]]
