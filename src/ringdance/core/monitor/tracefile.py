"""A timeline file. It queues records, because converting them must not take time from the ranks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from ringdance.core.monitor.chrome import END, ChromeWriter
from ringdance.core.monitor.links import Clock, RemoteRing
from ringdance.core.monitor.timeline import Timeline
from ringdance.core.ring import RECORD, RingReader, records

_SLICE = 500  # number of records to convert at a time
_RECORDS = 1 << 19  # maximum records per file, about 200 MB of JSON, which viewers can still open
# Converting takes longer than the ranks take to write, and they may need all cores. While they run,
# conversion gets this many seconds, and then this share of one core. The rest is converted at the end.
_FIRST_S, _SHARE = 0.3, 0.005
_BEFORE_S = 60.0  # time 0 is this long before the start, because Perfetto drops events before time 0


Source = RingReader | RemoteRing


class TraceFile:
    """A timeline file that is being written.

    Args:
        path: Path of the file.
        anew: True if the timeline starts now, rather than at the start of the job.

    Attributes:
        path: Path of the file, as passed.
        full: True if the file has reached its maximum size. Later records are dropped.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, anew: bool = False) -> None:
        self.path = path
        start = time.monotonic_ns() - int(_BEFORE_S * 1e9)
        self._timeline = Timeline(ChromeWriter(path, start, time.time() - _BEFORE_S))
        self._taken: deque[tuple[Source, int, bytes, int, int, int]] = deque()
        self._anew = anew
        self._lost: dict[Source, int] = {}
        self._room = _RECORDS
        self._spent, self._began = -_FIRST_S, time.monotonic()

    @property
    def full(self) -> bool:
        return self._room <= 0

    def add(self, source: Source, first: int, data: bytes, lost: int, clock: Clock | None = None) -> None:
        """Queue a result of ``RingReader.take``, and ``RingReader.lost``. ``clock``: None for this host."""
        if self.full or not data:
            return
        offset = -round(clock.ahead(RECORD.unpack_from(data)[0])) if clock else 0
        uncertainty = clock.uncertainty if clock else 0
        gap = lost - self._lost.setdefault(source, lost if self._anew else 0)
        self._lost[source] = lost
        size = _SLICE * RECORD.size
        for at in range(0, len(data), size):
            part = data[at : at + size]
            begin = first + at // RECORD.size
            self._taken.append((source, begin, part, offset, uncertainty, 0 if at else gap))
        self._room -= len(data) // RECORD.size

    def convert(self, everything: bool = False) -> None:
        """Write all queued records, or as many as time allows. Afterwards, the file is valid JSON."""
        if not self._taken:
            return
        began = time.monotonic()
        allowed = math.inf if everything else _SHARE * (began - self._began) - self._spent
        now = began
        while self._taken and now - began < allowed:
            source, first, data, *how = self._taken.popleft()
            self._timeline.add(source.who, source.name, records(first, data), *how)
            now = time.monotonic()
        self._timeline.writer.flush()
        self._spent += time.monotonic() - began

    def close(self, lacks: Sequence[str] = ()) -> None:
        """Write all records and a note about what the file lacks, then close it."""
        self.convert(everything=True)
        for text in [*lacks, *["everything after it reached its maximum size"] * self.full] or ["complete"]:
            self._timeline.writer.instant(0, 0, f"{END}{text}", time.monotonic_ns())
        self._timeline.writer.close()
