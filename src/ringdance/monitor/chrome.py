"""Write a trace in Chrome's format (JSON), which chrome://tracing and https://ui.perfetto.dev open."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ChromeWriter"]

_END = "\n]\n"


class ChromeWriter:
    """A trace file, which is valid JSON after each ``flush``.

    Args:
        path: of the file, which is overwritten.
        start: time 0 of the trace, in nanoseconds of ``time.monotonic_ns``.
        epoch: the same in seconds since the epoch.
        limit: most bytes; what comes later is left out, and the last event says so.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, start: int, epoch: float, limit: int = 1 << 30) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 : closed by close()
        self._start, self._limit = start, limit
        self._events: list[str] = []
        self._written = 0
        self._event("process_name", "M", 0, args={"start_time_since_epoch_in_micros": round(epoch * 1e6)})
        self.flush()

    def _event(self, name: str, phase: str, pid: int, **event: Any) -> None:
        self._events.append(json.dumps({"name": name, "ph": phase, "pid": pid, **event}))

    def _ts(self, when: int) -> float:
        return (when - self._start) / 1000

    def process(self, pid: int, name: str, order: int) -> None:
        self._event("process_name", "M", pid, args={"name": name})
        self._event("process_sort_index", "M", pid, args={"sort_index": order})

    def thread(self, pid: int, tid: int, name: str) -> None:
        self._event("thread_name", "M", pid, tid=tid, args={"name": name})

    def begin(self, pid: int, tid: int, name: str, when: int) -> None:
        self._event(name, "B", pid, tid=tid, ts=self._ts(when))

    def end(self, pid: int, tid: int, name: str, when: int, **args: Any) -> None:
        self._event(name, "E", pid, tid=tid, ts=self._ts(when), **({"args": args} if args else {}))

    def span(self, pid: int, tid: int, name: str, began: int, ended: int, **args: Any) -> None:
        more = {"args": args} if args else {}
        duration = max(0, ended - began) / 1000
        self._event(name, "X", pid, tid=tid, ts=self._ts(began), dur=duration, **more)

    def instant(self, pid: int, tid: int, name: str, when: int) -> None:
        self._event(name, "i", pid, tid=tid, ts=self._ts(when), s="g" if name == "CYCLE_START" else "p")

    def flush(self) -> None:
        if not self._events or self._written >= self._limit:
            self._events.clear()
            return
        text = ",\n".join(self._events)
        self._events.clear()
        if self._written + len(text) >= self._limit:
            text = '{"name": "the trace has reached its largest size", "ph": "i", "s": "g", "pid": 0}'
            self._limit = 0
        if self._written:
            self._file.seek(self._file.tell() - len(_END))
            text = f",\n{text}"
        else:
            text = f"[\n{text}"
        self._file.write(text + _END)
        self._written += len(text)
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()
