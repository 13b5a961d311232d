"""A timeline's file: records wait for their conversion, which must not take time from the ranks."""

from __future__ import annotations

import math
import time
from collections import deque

from ringdance.core.ring import RECORD, RingReader, records
from ringdance.monitor.chrome import ChromeWriter
from ringdance.monitor.links import RemoteRing
from ringdance.monitor.timeline import Timeline

__all__ = ["TraceFile"]

_SLICE = 500  # records converted at once
_RECORDS = 1 << 19  # at most: about 200 MB of JSON, which viewers still open
# Converting takes longer than the ranks take to write, and they may need all cores: while they run it gets so
# much time, and then this part of one core. What is left is converted at the end.
_FIRST_S, _SHARE = 0.3, 0.005
_BEFORE_S = 60.0  # time 0 is so much earlier: Perfetto leaves out what happened before it


Source = RingReader | RemoteRing


class TraceFile:
    """The file of a timeline.

    Args:
        path: of it.

    Attributes:
        full: whether it has its largest size; what comes later is left out.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        start = time.monotonic_ns() - int(_BEFORE_S * 1e9)
        self._timeline = Timeline(ChromeWriter(path, start, time.time() - _BEFORE_S))
        self._taken: deque[tuple[Source, int, bytes, int]] = deque()
        self._room = _RECORDS
        self._spent, self._began = -_FIRST_S, time.monotonic()

    @property
    def full(self) -> bool:
        return self._room <= 0

    def add(self, source: Source, first: int, data: bytes, offset: int = 0) -> None:
        """Add what ``RingReader.take`` has returned; ``offset``: nanoseconds to add to that clock."""
        if self.full:
            return
        size = _SLICE * RECORD.size
        for at in range(0, len(data), size):
            self._taken.append((source, first + at // RECORD.size, data[at : at + size], offset))
        self._room -= len(data) // RECORD.size

    def convert(self, everything: bool = False) -> None:
        """Write what was added, as far as there is time for it or everything; the file is valid after it."""
        if not self._taken:
            return
        began = time.monotonic()
        allowed = math.inf if everything else _SHARE * (began - self._began) - self._spent
        now = began
        while self._taken and now - began < allowed:
            source, first, data, offset = self._taken.popleft()
            self._timeline.add(source.who, source.name, records(first, data), offset)
            now = time.monotonic()
        self._timeline.writer.flush()
        self._spent += time.monotonic() - began

    def close(self) -> None:
        """Write everything, and close the file."""
        self.convert(everything=True)
        if self.full:
            self._timeline.writer.instant(0, 0, "the trace has reached its largest size", time.monotonic_ns())
        self._timeline.writer.close()
