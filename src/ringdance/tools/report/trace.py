"""Read a timeline in Chrome's JSON trace format. Truncated files are supported."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.files import NO_FORMAT, check_regular, typed

Key = tuple[int, int]
Span = tuple[str, float, float]
"""Name, start and end of a span. Times are in seconds."""

_LINES = 20_000  # number of lines to parse at a time


class Trace:
    """The events in a timeline.

    Attributes:
        processes: Process names by process ID.
        threads: Thread names by process and thread ID.
        spans: Spans of each thread, by process and thread ID.
        instants: Name and time of each instant event, by process and thread ID.
        rounds: Key (process set and round), start and end of each negotiation, by process and thread ID.
        uncertainties: Clock uncertainty by process ID.
        open: Name and start of each span whose end is not in the file, by process and thread ID.
    """

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.threads: dict[Key, str] = {}
        self.spans: dict[Key, list[Span]] = defaultdict(list)
        self.instants: dict[Key, list[tuple[str, float]]] = defaultdict(list)
        self.rounds: dict[Key, list[tuple[tuple[int, int], float, float]]] = defaultdict(list)
        self.uncertainties: dict[int, float] = defaultdict(float)
        self.open: dict[Key, list[tuple[str, float]]] = defaultdict(list)


def load(path: Path) -> Trace:
    """Read a timeline. Raises OSError if the file cannot be read, and LaunchError if it is not a timeline."""
    trace, place = Trace(), ""
    try:
        for place, event in _events(path):  # noqa: B007 : used below
            _add_event(trace, event)
    except NO_FORMAT as error:
        if isinstance(error, json.JSONDecodeError):
            place = f", line {error.lineno}"
        raise LaunchError(
            f"{path}{place} is not a timeline: it is not in Chrome's JSON format. Pass a file that "
            "`ringdance run --timeline FILE` has written"
        ) from None
    if not trace.processes:
        raise LaunchError(f"{path} has no events. Did the job end before its first exchange?")
    return trace


def _events(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield events, each with its position: line number if the monitor wrote the file, else event number."""
    check_regular(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != "[":
            file.seek(0)
            content = json.load(file)
            content = content["traceEvents"] if isinstance(content, dict) else content
            yield from ((f", event {number}", event) for number, event in enumerate(content, 1))
            return
        number = 2
        while lines := list(islice(file, _LINES)):
            lines = [line.rstrip(",\n") for line in lines]
            if lines[-1] in ("]", ""):
                lines.pop()
            try:
                content = json.loads("[" + ",\n".join(lines) + "]")
            except json.JSONDecodeError as error:
                if error.lineno < len(lines) or file.read(1):
                    error.lineno += number - 1
                    raise
                content = json.loads(f"[{','.join(lines[:-1])}]")  # the last line is truncated
            yield from ((f", line {at}", event) for at, event in enumerate(content, number))
            number += len(lines)


def _add_event(trace: Trace, event: dict[str, Any]) -> None:
    phase, pid = event["ph"], event["pid"]
    thread = (pid, event.get("tid", -1))
    if phase == "X":
        began = typed(event, "ts", float) / 1e6
        ended = began + typed(event, "dur", float) / 1e6
        trace.spans[thread].append((typed(event, "name", str), began, ended))
    elif phase == "B":
        trace.open[thread].append((typed(event, "name", str), typed(event, "ts", float) / 1e6))
    elif phase == "E" and trace.open[thread]:
        name, began = trace.open[thread].pop()
        args, ended = event.get("args", {}), typed(event, "ts", float) / 1e6
        if "round" in args:
            number = typed(args, "process_set", int), typed(args, "round", int)
            trace.rounds[thread].append((number, began, ended))
        elif "lost" not in args:
            trace.spans[thread].append((name, began, ended))
    elif phase == "C":
        trace.uncertainties[pid] = max(trace.uncertainties[pid], typed(event["args"], "value", float) / 1e6)
    elif phase == "i" and "ts" in event:
        trace.instants[thread].append((typed(event, "name", str), typed(event, "ts", float) / 1e6))
    elif event["name"] == "process_name" and "name" in event["args"]:
        trace.processes[pid] = typed(event["args"], "name", str)
    elif event["name"] == "thread_name":
        trace.threads[thread] = typed(event["args"], "name", str)
