"""All engines of a job in this process, one thread per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from loopback import LoopbackTransport, LoopbackWorld

from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.settings import Settings
from ringdance.training import session
from ringdance.training.ending import Process

T = TypeVar("T")
_thread = threading.local()


class _PerThread(Process):
    """Uses this thread's own engine if it has one, otherwise the process's engine."""

    @property
    def engine(self) -> Engine | None:
        return getattr(_thread, "engine", None) or self.__dict__.get("engine")

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self.__dict__["engine"] = engine


session._process.__class__ = _PerThread


@contextmanager
def bind(engine: Engine) -> Iterator[None]:
    """Bind ``engine`` to this thread."""
    _thread.engine = engine
    try:
        yield
    finally:
        _thread.engine = None


def world_for(
    settings: Settings, size: int, hosts: Sequence[str] | None = None, **others: Any
) -> LoopbackWorld:
    return LoopbackWorld(
        size,
        hosts=hosts,
        window=settings.window,
        buffer_bytes=max(1, buffer_bytes(settings, tuned=True)),
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
    """Run ``program`` on each rank with its engine bound to the thread. Return the results in rank order."""
    settings = settings or Settings()
    loopback = world or world_for(settings, size, hosts, **others)

    def rank(transport: LoopbackTransport) -> T:
        engine = Engine(transport, settings, threaded=threaded, report=report)
        with bind(engine):
            try:
                return program(engine)
            finally:
                if engine.rank not in loopback.dead:
                    engine.shutdown()

    return loopback.run(rank, timeout=None)  # with a timeout, a thread might keep running
