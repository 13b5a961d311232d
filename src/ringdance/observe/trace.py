"""Read a timeline's file: Chrome's JSON or Perfetto's packets, also one that ends in the middle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError

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


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number and value of each field; of bytes their begin and end in one number: begin << 32 | end."""
    while at < end:
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == 2:
            value, at = at << 32 | at + value, at + value
        elif tag & 7:
            raise ValueError("not a field of this kind")
        yield tag >> 3, value, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = data[at], 7
    at += 1
    if value > 127:
        value &= 127
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
    return value, at


def _message(data: bytes, place: int) -> dict[int, int]:
    return {number: value for number, value, _ in _fields(data, place >> 32, place & 0xFFFFFFFF)}


def _text(data: bytes, place: int) -> str:
    return data[place >> 32 : place & 0xFFFFFFFF].decode()


def _read_packets(trace: Trace, data: bytes) -> None:
    tracks: dict[int, Key] = {}
    at = 0
    while at < len(data):
        try:
            ((_, place, at),) = islice(_fields(data, at, len(data)), 1)
        except IndexError:
            return
        if at > len(data):
            return  # the file ends in this packet
        packet = _message(data, place)
        if 60 in packet:
            track = _message(data, packet[60])
            name = _text(data, track[2])
            if 5 in track:
                thread = tracks[track[1]] = (track[5], track[1])
                trace.threads[thread] = name
            else:
                trace.processes[track[1]] = name
        elif 11 in packet:
            event = _message(data, packet[11])
            thread, when = tracks[event[11]], packet[8] / 1e9
            if event[9] == 1:
                trace.open[thread].append((_text(data, event[23]), when))
            elif event[9] == 2:
                trace.end(thread, when)
            else:
                trace.instants[thread].append((_text(data, event[23]), when))
