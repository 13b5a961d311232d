"""Show how far a preparation is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

MARK = "ringdance data: "
"""Begins a line that reports images and bytes read since the last."""
_LINE_S = 10.0
_NAMED = 5


def say(text: str) -> None:
    """Tell the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def counted(names: Sequence[str]) -> str:
    """Return how many names there are, and the first of them."""
    return f"{len(names)} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"


class PrepareProgress:
    """Images or rows done, rate and time left, on stderr.

    Args:
        images: number that are to be done; 0: not known.
        size: of them, in bytes; or the same number.
        unit: what they are called.
    """

    def __init__(self, images: int, size: int, unit: str = "images") -> None:
        self._total, self._size, self._unit = images, size, unit
        self.images = self._bytes = 0
        self._start = self._last = time.monotonic()
        self._rest = b""
        console = Console(stderr=True)
        columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(30), TextColumn("{task.description}"))
        disabled = not console.is_terminal
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=disabled)
        self._task = self._bar.add_task("", total=size)

    def __enter__(self) -> PrepareProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, images: int, size: int) -> None:
        """Count images that were written, and their bytes."""
        self.images += images
        self._bytes += size
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._bytes, description=self.text)
        elif time.monotonic() - self._last >= _LINE_S:
            self._last = time.monotonic()
            of = f" of {self._total}" if self._total else ""
            print(f"{self.images}{of} {self._unit}, {self.text}", file=sys.stderr, flush=True)

    @property
    def text(self) -> str:
        """Rate and time left."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        left = (self._size - self._bytes) * seconds / max(self._bytes, 1)
        rate = f"{self.images / seconds:.0f} {self._unit}/s"
        if self._size != self._total:
            rate += f", {decimal(int(self._bytes / seconds))}/s"
        return f"{rate}, {time_text(left)} left" if self.images else "starting"

    def feed(self, data: bytes) -> None:
        """Take output of the processes: reports are counted, all else is shown."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                images, size = text.removeprefix(MARK).split()
                self.add(int(images), int(size))
            else:
                print(text, file=sys.stderr, flush=True)


def time_text(seconds: float) -> str:
    """Return a duration such as "2 h 05 min", "3 min 10 s" or "12 s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"
