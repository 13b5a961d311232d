"""Show the progress of a preparation as a bar if stderr is a terminal, otherwise as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_LINE_S = 10.0
_NAMED = 5


def say(text: str) -> None:
    """Print a message to the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def amount(number: int, noun: str, plural: str = "") -> str:
    """Format a number with a noun in the singular or plural, such as "1 file"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def counted(names: Sequence[str]) -> str:
    """Format the number of names and the first few, such as "2 (a.txt, b.txt)"."""
    return f"{len(names)} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"


class PrepareProgress(Progress):
    """Shows the number of finished samples, the rate and the remaining time on stderr.

    Args:
        size: Total work, in the unit of ``add``'s ``size``.
        unit: Name of the samples, such as "images".
    """

    def __init__(self, size: int, unit: str) -> None:
        console, text = Console(stderr=True), TextColumn("{task.description}")
        columns = TaskProgressColumn(), BarColumn(30), text, TimeRemainingColumn()
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._bar, self._size, self._unit = self.add_task("starting", total=size), size, unit
        self._samples = self._bytes = 0
        self._start = self._last = time.monotonic()

    def add(self, samples: int, size: int) -> None:
        """Add finished samples, and their size in bytes or another unit of work."""
        self._samples += samples
        self._bytes += size
        seconds = max(time.monotonic() - self._start, 1e-3)
        text = f"{self._samples} {self._unit}, {self._samples / seconds:.0f} {self._unit}/s"
        self.update(self._bar, completed=self._bytes, description=text)
        if self.disable and time.monotonic() - self._last >= _LINE_S:
            self._last = time.monotonic()
            say(f"{text}, {self._bytes / max(self._size, 1):.0%}")
