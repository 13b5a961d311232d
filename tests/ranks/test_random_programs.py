"""Random programs on three real ranks, with engines of several settings on one communicator each."""

from __future__ import annotations

import pytest
from programs.plan import make
from programs.play import Report, play
from programs.worlds import problems, settings_of

import ringdance.session as session
from ringdance.core.engine import Engine, area_bytes, vector_bytes
from ringdance.errors import RingdanceError

session.init()
COUNT = 50
BLOCK = 10  # programs on one engine


def engine_like(seed: int) -> Engine:
    """Return an engine with the settings of a seed's program; collective over all ranks."""
    from ringdance.transport.mpi import world_transport

    settings = settings_of(make(seed, session.engine().size))
    room = vector_bytes(session.engine().size, settings.cache_capacity)
    transport = world_transport(window_bytes=area_bytes(settings), vector_bytes=room)
    return Engine(transport, settings)


def gathered(report: Report) -> list[Report]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(report)


@pytest.mark.ranks(3)
@pytest.mark.limit(100)
@pytest.mark.parametrize(
    ("first", "mismatch"),
    [*((first, False) for first in range(0, COUNT, BLOCK)), (0, True), (BLOCK, True), (2 * BLOCK, True)],
)
def test_programs(first: int, mismatch: bool) -> None:
    own = first > 0  # the first block is for the session's engine, with the usual settings
    engine = engine_like(first) if own else session.engine()
    found = []
    for seed in range(first, first + BLOCK):
        program = make(seed, engine.size, mismatch=mismatch)
        print(program, f"mismatch={mismatch}", flush=True)
        try:
            report = play(engine, program)
        except RingdanceError as error:
            report = Report([f"{type(error).__name__}: {error}"])
        found += [f"{program}: {text}" for text in problems(program, gathered(report))]
        if engine.broken:
            break
    if own:
        assert engine.shutdown()
    assert not found
