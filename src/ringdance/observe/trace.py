"""Read a timeline's file: Chrome's JSON or Perfetto's packets, also one that ends in the middle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError
from ringdance.protobuf import fields, read_varint

__all__ = ["Span", "Trace", "load"]

Key = tuple[int, int]
Span = tuple[str, float, float]
"""Name, begin and end; times are in seconds."""

_LINES = 20_000  # parsed at once


class Trace:
    """The events of a timeline.

    Attributes:
        processes: names by number.
        threads: names by process and thread.
        spans: of each thread, in the order of their ends.
        instants: of each thread: name and time.
        open: of each thread: name and begin of spans that do not end in the file.
    """

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.threads: dict[Key, str] = {}
        self.spans: dict[Key, list[Span]] = defaultdict(list)
        self.instants: dict[Key, list[tuple[str, float]]] = defaultdict(list)
        self.open: dict[Key, list[tuple[str, float]]] = defaultdict(list)

    def end(self, thread: Key, when: float) -> None:
        """End the span that was begun last in a thread."""
        if self.open[thread]:
            name, began = self.open[thread].pop()
            self.spans[thread].append((name, began, when))


def load(path: Path) -> Trace:
    """Read a file. Raises LaunchError if it cannot be read or is no timeline."""
    trace = Trace()
    try:
        with path.open("rb") as file:
            first = file.read(1)
        if first == b"\n":  # field 1 of type 2: a packet
            _read_packets(trace, path.read_bytes())
        else:
            for event in _json_events(path):
                _add_event(trace, event)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise LaunchError(f"{path} is no timeline: neither Chrome's JSON nor Perfetto's packets") from None
    if not trace.processes:
        raise LaunchError(f"{path} has no events (was the job ended before its first exchange?)")
    return trace


# -- Chrome's JSON --------------------------------------------------------------------------


def _json_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file with an event on each line, as the monitor writes them; else of any file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != "[":
            file.seek(0)
            found = json.load(file)
            yield from found["traceEvents"] if isinstance(found, dict) else found
            return
        while lines := list(islice(file, _LINES)):
            lines = [line.rstrip(",\n") for line in lines]
            if lines[-1] in ("]", ""):
                lines.pop()
            try:
                yield from json.loads(f"[{','.join(lines)}]")
            except ValueError:  # the last line is cut off
                yield from json.loads(f"[{','.join(lines[:-1])}]")
                return


def _add_event(trace: Trace, event: dict[str, Any]) -> None:
    phase, pid = event["ph"], event["pid"]
    thread = (pid, event.get("tid", -1))
    if phase == "X":
        began = event["ts"] / 1e6
        trace.spans[thread].append((event["name"], began, began + event["dur"] / 1e6))
    elif phase == "B":
        trace.open[thread].append((event["name"], event["ts"] / 1e6))
    elif phase == "E":
        trace.end(thread, event["ts"] / 1e6)
    elif phase == "i" and "ts" in event:
        trace.instants[thread].append((event["name"], event["ts"] / 1e6))
    elif event["name"] == "process_name" and "name" in event["args"]:
        trace.processes[pid] = event["args"]["name"]
    elif event["name"] == "thread_name":
        trace.threads[thread] = event["args"]["name"]


# -- Perfetto's packets: see ringdance.monitor.perfetto for the numbers of fields ----------------------------


Place = tuple[int, int]
"""Where a field's value begins and ends."""


def _message(data: bytes, place: Place) -> dict[int, Place]:
    return {number: (begin, end) for number, begin, end in fields(data, *place)}


def _text(data: bytes, place: Place) -> str:
    return data[slice(*place)].decode()


def _integer(data: bytes, place: Place) -> int:
    return read_varint(data, place[0])[0]


def _read_packets(trace: Trace, data: bytes) -> None:
    tracks: dict[int, Key] = {}
    packets = fields(data, 0, len(data))
    while True:
        try:
            _, begin, end = next(packets)
        except (StopIteration, IndexError):  # the file ends, maybe in a packet
            return
        packet = _message(data, (begin, end))
        if 60 in packet:
            track = _message(data, packet[60])
            number, name = _integer(data, track[1]), _text(data, track[2])
            if 5 in track:
                thread = tracks[number] = (_integer(data, track[5]), number)
                trace.threads[thread] = name
            else:
                trace.processes[number] = name
        elif 11 in packet:
            event = _message(data, packet[11])
            thread, when = tracks[_integer(data, event[11])], _integer(data, packet[8]) / 1e9
            kind = _integer(data, event[9])
            if kind == 1:
                trace.open[thread].append((_text(data, event[23]), when))
            elif kind == 2:
                trace.end(thread, when)
            else:
                trace.instants[thread].append((_text(data, event[23]), when))
