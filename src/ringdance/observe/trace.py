"""Read a timeline's file, Chrome's JSON, also one that ends in the middle."""

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


def load(path: Path) -> Trace:
    """Read a file. Raises LaunchError if it cannot be read or is no timeline."""
    trace = Trace()
    try:
        for event in _events(path):
            _add_event(trace, event)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise LaunchError(f"{path} is no timeline: it is not Chrome's JSON") from None
    if not trace.processes:
        raise LaunchError(f"{path} has no events (was the job ended before its first exchange?)")
    return trace


def _events(path: Path) -> Iterator[dict[str, Any]]:
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
    elif phase == "E" and trace.open[thread]:
        name, began = trace.open[thread].pop()
        trace.spans[thread].append((name, began, event["ts"] / 1e6))
    elif phase == "i" and "ts" in event:
        trace.instants[thread].append((event["name"], event["ts"] / 1e6))
    elif event["name"] == "process_name" and "name" in event["args"]:
        trace.processes[pid] = event["args"]["name"]
    elif event["name"] == "thread_name":
        trace.threads[thread] = event["args"]["name"]
