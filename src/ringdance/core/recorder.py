"""The flight recorder: the last batches and events of this rank, written to a file when the engine fails."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

from ringdance.core.request import Collective, Work
from ringdance.core.ring import Kind, Ring, RingReader, Word
from ringdance.transport.base import Identity

__all__ = ["Profiler", "Recorder", "StepMark", "without_number"]

_NAME = re.compile(r"ringdance-(flight|stall|stacks)-rank\d+-\d+\.(json|txt)")
_KEPT_S = 7 * 86400.0
_KEPT_FILES = 32
_MIN_KEPT_S = 600.0  # for so long all are kept: a large job writes one for each rank
_STEP, _STEPS, _LAST_STEP = int(Kind.STEP), int(Word.STEPS), int(Word.LAST_STEP)  # quicker than Enums
_WAITED, _LAST_WAITED = int(Word.WAITED), int(Word.LAST_WAITED)


class StepMark(enum.IntEnum):
    """Who marks the steps. Once a higher one has, the marks of lower ones do not count: see ``step``."""

    NONE = 0
    GRADIENTS = 1  # an exchange of gradients for an optimizer that is not ours
    OPTIMIZER = 2
    SCRIPT = 3


class Profiler(NamedTuple):
    """A framework's own profiler, which shows waits too.

    Attributes:
        running: whether it is recording, in well below 1 µs.
        span: makes a span of a name.
    """

    running: Callable[[], bool]
    span: Callable[[str], AbstractContextManager[Any]]


class Recorder:
    """Writes what this rank does into its ring, from which all reports are made.

    Args:
        capacity: how many records a flight record holds.
        directory: for flight records; "" for the system's temporary directory.
        ring: where records go; None for memory of this process alone.

    Attributes:
        words: the ring's header, see ``ring.Word``; ``words[Word.DETAIL]`` asks for submissions and chunks.
        add, label: those of the ring.
    """

    def __init__(self, capacity: int, directory: str, ring: Ring | None = None) -> None:
        self.ring = ring or Ring()
        self.words = self.ring.words
        self.add, self.label = self.ring.add, self.ring.label
        self._capacity, self._directory = capacity, directory
        self._step_mark, self._steps = StepMark.NONE, 0

    def batch(
        self, set_id: int, round_number: int, kind: int, label: int, began: int, nbytes: int, tensors: int
    ) -> None:
        """Record a batch that ends now; ``began``: in nanoseconds of ``time.monotonic_ns``."""
        now = time.monotonic_ns()
        self.add(
            Kind.BATCH, label, set_id, (now - began) // 1000, round_number, kind, nbytes, nbytes >> 32, now
        )
        words = self.words
        words[Word.BATCHES] += 1
        words[Word.TENSORS] += tensors
        words[Word.BYTES] += nbytes

    def submit(self, work: Work) -> None:
        """Record a submission."""
        request = work.request
        nbytes = sum([view.nbytes for view in request.inputs])
        label, kind = self.label(without_number(work.name)), request.description.kind
        self.add(Kind.SUBMIT, label, request.set_id, nbytes, nbytes >> 32, kind)

    def alone(self, work: Work) -> None:
        """Record the batch of a request that only this rank takes part in."""
        request = work.request
        nbytes = sum([view.nbytes for view in request.inputs])
        label, began = self.label(without_number(work.name)), int(work.submitted * 1e9)
        if self.words[Word.DETAIL] > 1:
            self.add(Kind.ROUND)
        self.batch(request.set_id, 0, request.description.kind, label, began, nbytes, 1)

    def marks(self) -> list[int]:
        """Return a list for the times between a batch's phases; empty, to be left so, if none are wanted."""
        return [time.monotonic_ns()] if self.words[Word.DETAIL] else []

    def chunks(self, set_id: int, marks: list[int]) -> None:
        """Record the phases of a batch's chunks.

        Args:
            set_id: of the process set.
            marks: times: the begin; then for each chunk the ends of copying in, of waiting, of copying out
                the chunk before, and of reducing. ``Kind.CHUNK`` begins with the waiting.
        """
        self.add(Kind.CHUNK, 0, set_id, 0, 0, 0, marks[1] - marks[0], when=marks[0])
        for number in range(1, len(marks) - 1, 4):
            times = marks[number : number + 5]
            wait, copy_out, *rest = [after - before for before, after in pairwise(times)]
            reduce, copy_in = rest or (0, 0)
            self.add(Kind.CHUNK, 0, set_id, wait, copy_out, reduce, copy_in, when=times[0])

    def step(self, mark: StepMark = StepMark.OPTIMIZER) -> None:
        """Record that a step ends now; those that were marked by a lower ``mark`` were none."""
        words, now = self.words, time.monotonic_ns()
        if mark != self._step_mark:
            if mark < self._step_mark:
                return
            words[_STEPS] -= self._steps
            self._step_mark, self._steps = mark, 0
        self._steps += 1
        words[_STEPS] += 1
        words[_LAST_STEP] = now
        words[_LAST_WAITED] = words[_WAITED]
        if words[_STEPS] == 1:
            words[Word.FIRST_STEP], words[Word.FIRST_WAITED] = now, words[Word.WAITED]
        self.add(_STEP, 0, 0, words[_STEPS], when=now)

    def progress(self) -> str:
        """Return how far this rank has come: "12 steps" or, where none are counted, "30 exchanges"."""
        steps, batches = self.words[Word.STEPS], self.words[Word.BATCHES]
        return f"{steps} steps" if steps else f"{batches} exchanges"

    def text(self, what: str) -> None:
        """Record an event in words."""
        self.add(Kind.TEXT, self.label(what))

    def _records(self) -> list[dict[str, Any]]:
        reader = RingReader(self.ring.memory)
        offset = self.words[Word.EPOCH_OFFSET]
        found = []
        for record in reader.last(self._capacity):
            names = reader.name(record.label)
            entry = {"time": (record.time + offset) / 1e9, "kind": Kind(record.kind).name.lower()}
            if record.kind == Kind.BATCH:
                duration, round_number, kind, low, high = record.values
                entry["details"] = {
                    "process_set": record.set_id, "round": round_number, "operation": Collective(kind).name,
                    "names": [names] if isinstance(names, str) else names, "bytes": low | high << 32,
                    "seconds": duration / 1e6,
                }  # fmt: skip
            else:
                entry["details"] = names
            found.append(entry)
        return found

    def dump(self, who: Identity, reason: str, pending: list[str]) -> str | None:
        """Write all records as JSON; return the file's path, or None if it cannot be written."""
        content = {
            "rank": who.rank,
            "host": who.host,
            "pid": who.pid,
            "reason": reason,
            "pending": pending,
            "records": self._records(),
        }
        return self.save("flight", who, json.dumps(content, default=str, indent=1))

    def save(self, kind: str, who: Identity, text: str) -> str | None:
        """Write a file about a rank beside the flight records; return its path, or None if that fails.

        Args:
            kind: "flight" or "stall" for JSON, "stacks" for text.
            who: the rank.
            text: what to write.
        """
        ending = "txt" if kind == "stacks" else "json"
        try:
            directory = self._directory or tempfile.gettempdir()
            path = os.path.join(directory, f"ringdance-{kind}-rank{who.rank}-{who.pid}.{ending}")
            os.makedirs(directory, exist_ok=True)
            _remove_old(directory)
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600
            )
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError:
            return None
        return path


def without_number(name: str) -> str:
    """Return a name as a label: those of unnamed operations without their numbers, which never end."""
    return name.rstrip("0123456789").rstrip(".") if ".noname." in name else name


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
