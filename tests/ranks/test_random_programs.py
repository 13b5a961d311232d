"""Random programs on three real ranks, some of them with other settings."""

from __future__ import annotations

import contextlib

import pytest
from other_settings import other_settings
from programs.plan import make
from programs.play import Report, play
from programs.worlds import problems, settings_of
from sampled import sampled

import ringdance.training.session as session
from ringdance.errors import RingdanceError

session.init()
COUNT = 50
BLOCK = 5  # programs with the same settings
BLOCKS = sampled("random programs", range(0, COUNT, BLOCK), 1, always=[0])  # the first: default settings
SETTING_NAMES = (
    "fusion_threshold",
    "cycle_time",
    "cache_capacity",
    "chunk_bytes",
    "small_bytes",
    "window",
    "spin_microseconds",
)


def environ_of(seed: int) -> dict[str, str]:
    """Return the settings for a seed's program."""
    settings = settings_of(make(seed, session.engine().size))
    values = {name: getattr(settings, name) for name in SETTING_NAMES}
    return {
        f"RINGDANCE_{name.upper()}": str(int(value) if name == "window" else value)
        for name, value in values.items()
    }


def gathered(report: Report) -> list[Report]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(report)


@pytest.mark.ranks(3)
@pytest.mark.limit(100)
@pytest.mark.parametrize("mismatch", [False, True])
@pytest.mark.parametrize("first", BLOCKS)
def test_programs(first: int, mismatch: bool) -> None:
    results = []
    with other_settings(environ_of(first)) if first else contextlib.nullcontext():
        engine = session.engine()
        assert not first or engine.settings.cache_capacity == settings_of(make(first, 3)).cache_capacity
        for seed in range(first, first + BLOCK):
            program = make(seed, engine.size, mismatch=mismatch)
            print(program, f"mismatch={mismatch}", flush=True)
            try:
                report = play(engine, program)
            except RingdanceError as error:
                report = Report([f"{type(error).__name__}: {error}"])
            results += [f"{program}: {text}" for text in problems(program, gathered(report))]
            if engine.end.broken:
                break
    assert not results
