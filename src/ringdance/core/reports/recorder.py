"""The flight recorder: the last batches and events of this rank, written to a file when the engine fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections import deque
from typing import Any

from ringdance.transport.base import Identity

__all__ = ["Recorder"]

_NAME = re.compile(r"ringdance-flight-rank\d+-\d+\.json")
_KEPT_S = 7 * 86400.0
_KEPT_FILES = 32
_MIN_KEPT_S = 600.0  # for so long all are kept: a large job writes one for each rank


class Recorder:
    """Keeps the last ``capacity`` records in memory.

    A record is (seconds since the epoch at its end, kind, details). Batches have kind
    "batch" and details (set, round, collective, names, bytes, seconds it took).
    """

    def __init__(self, capacity: int, directory: str) -> None:
        self._records: deque[tuple[float, str, Any]] = deque(maxlen=max(1, capacity))
        self._directory = directory

    def add(self, kind: str, details: Any) -> None:
        """Add one record."""
        self._records.append((time.time(), kind, details))

    def records(self) -> list[tuple[float, str, Any]]:
        """Return the records, oldest first."""
        return list(self._records)

    def dump(self, who: Identity, reason: str, pending: list[str]) -> str | None:
        """Write all records as JSON; return the file's path, or None if it cannot be written."""
        content = {
            "rank": who.rank,
            "host": who.host,
            "pid": who.pid,
            "reason": reason,
            "pending": pending,
            "records": [
                {"time": when, "kind": kind, "details": details} for when, kind, details in self.records()
            ],
        }
        try:
            directory = self._directory or tempfile.gettempdir()
            path = os.path.join(directory, f"ringdance-flight-rank{who.rank}-{who.pid}.json")
            os.makedirs(directory, exist_ok=True)
            _remove_old(directory)
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, default=str, indent=1)
        except OSError:
            return None
        return path


def _remove_old(directory: str) -> None:
    """Remove records older than a week, and older than ten minutes all but the newest 32."""
    found = []
    for entry in os.scandir(directory):
        if _NAME.fullmatch(entry.name):
            with contextlib.suppress(OSError):
                found.append((time.time() - entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for newer, (age, path) in enumerate(sorted(found)):
        if age > _KEPT_S or (age > _MIN_KEPT_S and newer >= _KEPT_FILES):
            with contextlib.suppress(OSError):  # another user's
                os.unlink(path)
