"""A rank's ring buffer for its host's monitor, and the monitor's client on the rank that started it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ringdance.core.engine import Engine
from ringdance.core.monitor.client import MonitorClient
from ringdance.core.ring import Ring, Word, shared_memory
from ringdance.errors import ArgumentError
from ringdance.settings import Settings

_log = logging.getLogger("ringdance")

DYNAMIC = "DYNAMIC"
"""Value of the setting ``timeline``: prepare for ``start_timeline``."""


class RankMonitor:
    """Holds the ring buffer and the monitor's client. Outlives an engine, and also serves the next one."""

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._client: MonitorClient | None = None
        self._started = False  # True once an engine has started
        self._killed = ""  # how this host's monitor was killed, or "" if it was not

    def prepare(self) -> Ring:
        """Create the ring before the ranks connect, so that the monitor later finds all ranks' rings."""
        self._ring = self._ring or Ring(shared_memory())
        return self._ring

    def ring(self, settings: Settings) -> Ring:
        """Return the ring for the next engine. Call this only after all ranks have connected.

        Until then, the monitor of the previous engine may still be reading the ring.
        """
        ring = self.prepare()
        ring.words[Word.CLOSED] = 0
        if settings.timeline not in ("", DYNAMIC):  # Record details even before the monitor runs.
            ring.words[Word.DETAIL] = 0 if any(settings.timeline_steps[:1]) else _detail(settings)
        return ring

    def start(self, engine: Engine) -> None:
        """Start this host's monitor if a setting requires it."""
        settings = engine.settings
        first_engine, self._started = not self._started, True
        if settings.timeline_steps:
            first, end = settings.timeline_steps
            engine.recorder.window = first, end, _detail(settings)
        metrics = bool(settings.metrics_dir or settings.metrics_port)
        if engine.local_rank or not (settings.timeline or metrics):
            return
        pids = [engine.transport.identities[rank].pid for rank in engine.transport.host_group]
        try:
            client = self._client = MonitorClient(pids, metrics)
        except OSError as error:
            _log.error("ringdance: no timeline or metrics will be written: %s", error)
            return
        if settings.timeline:
            _start_timeline(engine, client)
        if metrics:
            client.metrics(
                rank=engine.rank, interval=settings.metrics_interval,
                directory=settings.metrics_dir and os.path.abspath(settings.metrics_dir), anew=first_engine,
                address=settings.metrics_port,
            )
        engine.on_check = lambda: self._check(engine)

    def _check(self, engine: Engine) -> None:
        """Warn if the monitor was killed."""
        how = self._client.killed() if self._client else ""
        if not how:
            return
        self._killed = how
        self._client, engine.on_check = None, lambda: None
        text = "ringdance: %s: %s. From now on, the timeline and the metrics lack this host's ranks."
        _log.warning(text, engine.identity.host, how)

    def end(self, engine: Engine) -> None:
        """Close the ring and wait until the monitor has written everything."""
        self._check(engine)
        engine.recorder.publish()
        engine.recorder.words[Word.CLOSED] = 1
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def start_timeline(self, engine: Engine, path: str, mark_cycles: bool) -> None:
        """Start a timeline. Does nothing on ranks other than 0.

        Raises:
            ArgumentError: The setting ``timeline`` is not set. Set it to "DYNAMIC" to use this method.
        """
        if not engine.settings.timeline:
            raise ArgumentError(
                "start_timeline() requires RINGDANCE_TIMELINE=DYNAMIC (or HOROVOD_TIMELINE=DYNAMIC), which "
                "must be set before init()."
            )
        self._ask(engine, lambda client: client.start(path, 2 if mark_cycles else 1))
        engine.recorder.read_detail()  # Record the next submission too, even if it precedes the next round.

    def stop_timeline(self, engine: Engine) -> None:
        """Complete the timeline. Does nothing on ranks other than 0."""
        self._ask(engine, MonitorClient.stop)

    def _ask(self, engine: Engine, ask: Callable[[MonitorClient], None]) -> None:
        if self._killed and not engine.rank:
            _log.error("ringdance: the timeline is not written: %s", self._killed)
        elif self._client is not None and not engine.rank:
            try:
                ask(self._client)
            except OSError as error:
                _log.error("ringdance: the timeline is not written: %s", error)
            engine.recorder.read_detail()


def _detail(settings: Settings) -> int:
    return 2 if settings.timeline_mark_cycles else 1


def _start_timeline(engine: Engine, client: MonitorClient) -> None:
    """Connect all monitors to rank 0's monitor, which writes the timeline."""
    settings = engine.settings
    if engine.rank:
        engine.on_monitor = lambda note: client.connect(note["addresses"], note["port"], note["token"])
        return
    try:
        if engine.local_size < engine.size:
            engine.post_all({"kind": "monitor", **client.listen(others=engine.cross_size - 1)})
        if settings.timeline != DYNAMIC:
            detail = None if settings.timeline_steps else _detail(settings)
            client.start(settings.timeline, detail, anew=False)
    except OSError as error:
        _log.error("ringdance: no timeline will be written: %s", error)
