"""Write a trace in Perfetto's format, which https://ui.perfetto.dev opens: a sequence of packets.

A file that ends in the middle of a packet can be read up to it. Field numbers are those of ``trace_packet``,
``track_descriptor`` and ``track_event`` (https://perfetto.dev/docs/reference/trace-packet-proto).
"""

from __future__ import annotations

from typing import Any

from ringdance.protobuf import delimited, varint

__all__ = ["PerfettoWriter"]

_PACKET, _TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _TRACK_DESCRIPTOR = 1, 8, 10, 11, 60
_UUID, _NAME, _PARENT, _ORDER = 1, 2, 5, 12
_ANNOTATION, _TYPE, _TRACK, _EVENT_NAME = 4, 9, 11, 23
_ANNOTATION_NAME, _ANNOTATION_INT, _ANNOTATION_TEXT = 10, 4, 6
_BEGIN, _END, _INSTANT = 1, 2, 3


class PerfettoWriter:
    """A trace file; times are in nanoseconds.

    Args:
        path: of the file, which is overwritten.
        limit: most bytes; what comes later is left out.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, limit: int = 1 << 30) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 : closed by close()
        self._left = limit
        self._known: dict[tuple[int, int, int, str], bytes] = {}

    def _write(self, *fields: bytes) -> None:
        packet = delimited(_PACKET, b"".join([*fields, _int(_SEQUENCE, 1)]))
        self._left -= len(packet)
        if self._left >= 0:
            self._file.write(packet)

    def process(self, pid: int, name: str, order: int) -> None:
        """Name a process, and say where it stands."""
        descriptor = _int(_UUID, _track(pid)) + delimited(_NAME, name.encode()) + _int(_ORDER, order)
        self._write(delimited(_TRACK_DESCRIPTOR, descriptor))

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Name a thread of a process."""
        descriptor = _int(_UUID, _track(pid, tid)) + delimited(_NAME, name.encode())
        descriptor += _int(_PARENT, _track(pid))
        self._write(delimited(_TRACK_DESCRIPTOR, descriptor))

    def _event(self, kind: int, pid: int, tid: int, when: int, name: str = "", **args: Any) -> None:
        key = kind, pid, tid, name
        event = self._known.get(key)
        if event is None:
            event = _int(_TYPE, kind) + _int(_TRACK, _track(pid, tid))
            event += delimited(_EVENT_NAME, name.encode()) if name else b""
            self._known[key] = event
        for word, value in args.items():
            text = isinstance(value, str)
            data = delimited(_ANNOTATION_TEXT, value.encode()) if text else _int(_ANNOTATION_INT, value)
            event += delimited(_ANNOTATION, delimited(_ANNOTATION_NAME, word.encode()) + data)
        self._write(_int(_TIMESTAMP, when), delimited(_TRACK_EVENT, event))

    def begin(self, pid: int, tid: int, name: str, when: int) -> None:
        """Begin a span."""
        self._event(_BEGIN, pid, tid, when, name)

    def end(self, pid: int, tid: int, name: str, when: int, **args: Any) -> None:
        """End the span that was begun last in this thread."""
        self._event(_END, pid, tid, when, **args)

    def span(self, pid: int, tid: int, name: str, began: int, ended: int, **args: Any) -> None:
        """Write a span."""
        if began == ended:
            self._event(_INSTANT, pid, tid, began, name, **args)
        else:
            self._event(_BEGIN, pid, tid, began, name, **args)
            self._event(_END, pid, tid, ended)

    def instant(self, pid: int, tid: int, name: str, when: int) -> None:
        """Write a moment."""
        self._event(_INSTANT, pid, tid, when, name)

    def flush(self) -> None:
        """Write what was added; the file can be read until the next call."""
        self._file.flush()

    def close(self) -> None:
        """Write the rest, and close the file."""
        self._file.close()


def _track(pid: int, tid: int = -1) -> int:
    return (pid + 1 << 24) + tid + 1


def _int(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)
