"""Write the metrics of a host's ranks as JSON lines, and serve them as OpenMetrics."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO

from ringdance.core.ring import RingReader
from ringdance.errors import pip_install

_SPARSER = 1000  # maximum ratio of run time to sampling interval, so that long runs write few samples


class Metrics:
    """Writes and serves the metrics of this host's ranks.

    Args:
        readers: Readers of the ranks' rings.
        path: Additional entries for ``sys.path``: directories with installed packages.
        interval: Minimum number of seconds between two samples in the file.
        directory: Directory for ``metrics-<rank>.jsonl``. "" to write no files.
        anew: If True, overwrite the file.
        address: Address at which to serve the metrics, ``[ADDRESS:]PORT``. "" not to serve them.
        rank: Lowest rank on this host.
        warn: Called with a description of each problem.
    """

    def __init__(
        self, readers: Sequence[RingReader], path: Sequence[str], interval: float, directory: str, anew: bool,
        address: str, rank: int, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        sys.path += [entry for entry in path if entry not in sys.path]
        from ringdance.core.monitor.sampler import Sampler

        self._sampler = Sampler(readers)
        self._file: FileIO | None = None
        self._interval, self._began = interval, time.monotonic()
        self._next = self._began + min(1.0, interval)
        self._warn, self._said = warn, set[str]()
        if directory:
            with self._problem("metrics are not written"):
                os.makedirs(directory, exist_ok=True)
                file = os.path.join(directory, f"metrics-{rank}.jsonl")
                self._file = FileIO(file, "w" if anew else "a")
        if address:
            with self._problem("metrics are not served"):
                from ringdance.core.monitor.openmetrics import serve

                url = serve(address, self._sampler.rows)
                if address.rpartition(":")[2] == "0":
                    self._say(f"metrics are at {url}")

    @contextlib.contextmanager
    def _problem(self, what: str) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name
            package = (missing or "").partition(".")[0]
            why = f"the package {package} is missing: {pip_install(package)}" if package else str(error)
            self._say(f"{what}: {why}")
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._say(f"{what}: {where}{error.strerror or error}")
        except Exception as error:  # an error in a package must not end the timeline
            self._say(f"{what}: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn(text)

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
        """Write a sample, or skip it if the disk is full."""
        rows = self._sampler.rows()
        if self._file is not None:
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            with self._problem(f"{self._file.name} lacks samples"):
                if (written := self._file.write(data)) < len(data):
                    self._file.seek(-written, os.SEEK_CUR)
                    self._file.truncate()
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
