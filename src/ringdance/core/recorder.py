"""The flight recorder: the last batches and events of this rank, written to a file when the engine fails."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import deque
from typing import Any

from ringdance.transport.base import Identity

__all__ = ["Recorder"]


class Recorder:
    """Keeps the last ``capacity`` records in memory.

    A record is (seconds since the epoch at its end, kind, details). Batches have kind
    "batch" and details (set, round, verb, names, bytes, seconds it took).
    """

    def __init__(self, capacity: int, folder: str) -> None:
        self._records: deque[tuple[float, str, Any]] = deque(maxlen=max(1, capacity))
        self._folder = folder

    def add(self, kind: str, details: Any) -> None:
        """Remember one event."""
        self._records.append((time.time(), kind, details))

    def records(self) -> list[tuple[float, str, Any]]:
        """Return what is remembered, oldest first."""
        return list(self._records)

    def dump(self, who: Identity, reason: str, pending: list[str]) -> str | None:
        """Write all records as JSON; return the file's path, or None if it cannot be written."""
        folder = self._folder or tempfile.gettempdir()
        path = os.path.join(folder, f"ringdance-flight-rank{who.rank}-{who.pid}.json")
        content = {
            "rank": who.rank,
            "host": who.host,
            "pid": who.pid,
            "reason": reason,
            "pending": pending,
            "records": [
                {"time": when, "kind": kind, "details": details} for when, kind, details in self._records
            ],
        }
        try:
            os.makedirs(folder, exist_ok=True)
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, default=str, indent=1)
        except OSError:
            return None
        return path
