"""Write the figures of a host's ranks: JSON lines, TensorBoard's event files; serve them as OpenMetrics."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from io import FileIO

from ringdance.core.ring import RingReader

__all__ = ["Metrics"]

_SPARSER = 1000  # so many intervals at most in the time until now: a long run's file grows slowly


class Metrics:
    """The figures of this host's ranks, where a user wants them.

    Args:
        readers: of the ranks' rings.
        path: more of ``sys.path``, where packages are.
        interval: seconds between two samples that are written.
        directory: for ``metrics-<lowest rank>.jsonl``, or "".
        anew: overwrite the file.

    Raises:
        OSError: a file cannot be written.
    """

    def __init__(
        self, readers: Sequence[RingReader], path: Sequence[str], interval: float, directory: str, anew: bool
    ) -> None:
        sys.path += [one for one in path if one not in sys.path]
        from ringdance.monitor.sampler import Sampler

        self._sampler = Sampler(readers)
        self._file: FileIO | None = None
        self._interval, self._began = interval, time.monotonic()
        self._next = self._began + min(1.0, interval)
        if directory:
            os.makedirs(directory, exist_ok=True)
            name = f"metrics-{min(reader.who.rank for reader in readers)}.jsonl"
            self._file = FileIO(os.path.join(directory, name), "w" if anew else "a")

    def write_if_due(self) -> None:
        """Write a sample if it is time for one."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + max(self._interval, (now - self._began) / _SPARSER)
            self._write()

    def leave(self, pids: Sequence[int]) -> None:
        """Write the last sample of ranks that have left."""
        if pids:
            self._write()
            self._sampler.leave(pids)

    def _write(self) -> None:
        """Write a sample; one for which there is no room is left out."""
        rows = self._sampler.rows()
        if self._file is not None:
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            with contextlib.suppress(OSError):
                if (written := self._file.write(data)) < len(data):
                    self._file.truncate(self._file.tell() - written)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
