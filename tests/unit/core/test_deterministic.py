"""The setting ``deterministic``: timing does not change what is summed or in which order."""

from __future__ import annotations

import pytest
from loopback_job import job
from programs.sums import digest
from sampled import part

from ringdance.core.engine import Engine
from ringdance.settings import Settings

HOSTS = {
    "one host": ("a", "a", "a"),
    "three hosts": ("a", "a", "b", "b", "c", "c"),
    "unequal hosts": ("a", "a", "a", "b"),
    "no two on a host": ("a", "b", "c"),
}


@pytest.mark.parametrize("hosts", [
    pytest.param(hosts, id=name, marks=[] if "hosts" in name else pytest.mark.slow)
    for name, hosts in HOSTS.items()
])  # fmt: skip
def test_two_runs_are_bit_equal_under_different_delays(hosts: tuple[str, ...]) -> None:
    settings = Settings(deterministic=True, chunk_bytes=16 << 10, small_bytes=2 << 10, cycle_time=0.5)
    seeds = part(f"deterministic {hosts}", range(40), 3)
    runs = []
    for delays in (1, 2):

        def program(engine: Engine, delays: int = delays) -> list[str]:
            return [digest(engine, seed, 100 * delays + seed, steps=1) for seed in seeds]

        runs.append(job(len(hosts), program, settings, hosts=hosts, seed=delays, delay=0.2))
    assert runs[0] == runs[1]
