"""Engines of a whole job in this process, one thread for each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from loopback import LoopbackTransport, LoopbackWorld

from ringdance import session
from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.settings import Settings

T = TypeVar("T")


def world_for(
    settings: Settings, size: int, hosts: Sequence[str] | None = None, **others: Any
) -> LoopbackWorld:
    return LoopbackWorld(
        size,
        hosts=hosts,
        window=settings.window,
        buffer_bytes=max(1, buffer_bytes(settings)),
        vector_bytes=vector_bytes(size, settings.cache_capacity),
        **others,
    )


def job(
    size: int,
    program: Callable[[Engine], T],
    settings: Settings | None = None,
    *,
    world: LoopbackWorld | None = None,
    hosts: Sequence[str] | None = None,
    threaded: bool = True,
    report: Callable[[str], None] | None = None,
    **others: Any,
) -> list[T]:
    """Run ``program`` on each rank, with its engine bound to the thread; return the results by rank."""
    settings = settings or Settings()
    loopback = world or world_for(settings, size, hosts, **others)

    def rank(transport: LoopbackTransport) -> T:
        engine = Engine(transport, settings, threaded=threaded, report=report)
        with session.bind(engine):
            try:
                return program(engine)
            finally:
                if engine.rank not in loopback.dead:
                    engine.shutdown()

    return loopback.run(rank, timeout=None)  # a limit would be a thread that may go on
