"""Write a trace in Chrome's JSON format, for chrome://tracing and https://ui.perfetto.dev."""

from __future__ import annotations

import json
from typing import Any

END = "end of the timeline: "
"""Prefix of the events that are written only when the file is closed."""

_END = "\n]\n"


class ChromeWriter:
    """A trace file that is valid JSON after each ``flush``. Times are in nanoseconds.

    Args:
        path: Path of the file, which is overwritten.
        start: Time 0 of the trace, as returned by ``time.monotonic_ns``.
        epoch: Time 0 of the trace in seconds since the epoch.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, start: int, epoch: float) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 : closed by close()
        self._start = start
        self._events: list[str] = []
        self._quoted: dict[str, str] = {}
        self._event("process_name", "M", 0, args={"start_time_since_epoch_in_micros": round(epoch * 1e6)})
        self.flush()

    def _event(self, name: str, phase: str, pid: int, **event: Any) -> None:
        self._events.append(json.dumps({"name": name, "ph": phase, "pid": pid, **event}))

    def _timed(self, name: str, phase: str, pid: int, tid: int, when: int, more: str = "") -> None:
        """Add a timed event. Avoids ``json.dumps``, which would take five times as long."""
        quoted = self._quoted.get(name)
        if quoted is None:
            quoted = self._quoted[name] = json.dumps(name)
        at = (when - self._start) / 1000
        self._events.append(
            f'{{"name": {quoted}, "ph": "{phase}", "pid": {pid}, "tid": {tid}, "ts": {at:.3f}{more}}}'
        )

    def process(self, pid: int, name: str, order: int) -> None:
        """Set the name of a process, and its position among the processes in the viewer."""
        self._event("process_name", "M", pid, args={"name": name})
        self._event("process_sort_index", "M", pid, args={"sort_index": order})

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Set the name of a thread."""
        self._event("thread_name", "M", pid, tid=tid, args={"name": name})

    def begin(self, pid: int, tid: int, name: str, when: int) -> None:
        """Start a span."""
        self._timed(name, "B", pid, tid, when)

    def end(self, pid: int, tid: int, name: str, when: int, **args: Any) -> None:
        """End the most recently started span of a thread."""
        self._timed(name, "E", pid, tid, when, _args(args))

    def span(self, pid: int, tid: int, name: str, began: int, ended: int, **args: Any) -> None:
        """Write a complete span."""
        duration = max(0, ended - began) / 1000
        self._timed(name, "X", pid, tid, began, f', "dur": {duration:.3f}{_args(args)}')

    def counter(self, pid: int, name: str, when: int, value: float) -> None:
        """Write the value of a counter, which is valid from ``when`` on."""
        self._timed(name, "C", pid, 0, when, _args({"value": value}))

    def instant(self, pid: int, tid: int, name: str, when: int) -> None:
        """Write an event without a duration."""
        scope = "g" if name == "CYCLE_START" else "p"
        self._timed(name, "i", pid, tid, when, f', "s": "{scope}"')

    def flush(self) -> None:
        """Write the events added so far. Afterwards, the file is valid JSON."""
        if not self._events:
            return
        size = self._file.tell()
        self._file.seek(max(0, size - len(_END)))
        self._file.write((",\n" if size else "[\n") + ",\n".join(self._events) + _END)
        self._file.flush()
        self._events.clear()

    def close(self) -> None:
        """Write the remaining events and close the file."""
        self.flush()
        self._file.close()


def _args(args: dict[str, Any]) -> str:
    return f', "args": {json.dumps(args)}' if args else ""
