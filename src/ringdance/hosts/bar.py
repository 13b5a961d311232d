"""The progress of a copy, on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from ringdance.hosts import show

_EVERY_S = 0.2
_WIDTH = 24


class Bar:
    """Shows how far the slowest host is; silent where stderr is no terminal.

    Args:
        total: bytes that each host shall have in the end.
        write: shows a text.
        clock: the time in seconds.
    """

    def __init__(
        self,
        total: int,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._clock = total, clock
        self._write = write or (_to_terminal if sys.stderr.isatty() else None)
        self._began: tuple[float, int] | None = None
        self._shown = -_EVERY_S
        self._open = False

    def __call__(self, have: Mapping[str, int]) -> None:
        """Show it, if the last time is long enough ago."""
        now = self._clock()
        if self._write is None or not have or now - self._shown < _EVERY_S:
            return
        self._shown = now
        slowest = min(have, key=have.__getitem__)
        self._began = self._began or (now, have[slowest])
        self._write("\r\033[K" + self.line(have, now))
        self._open = True

    def line(self, have: Mapping[str, int], now: float) -> str:
        """The text: a bar, how much, how fast, how long it will take, and who is behind."""
        began, before = self._began or (now, 0)
        slowest = min(have, key=have.__getitem__)
        done = have[slowest]
        share = done / self._total if self._total else 1.0
        full = int(share * _WIDTH)
        words = f"[{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}"
        words += f"  {show.size(done)} of {show.size(self._total)}"
        rate = (done - before) / (now - began) if now > began else 0.0
        if rate > 0:
            words += f"  {show.size(rate)}/s  {show.seconds((self._total - done) / rate)} left"
        behind = max(have.values()) - done > self._total / 50
        return words + (f"  ({slowest} is behind)" if behind else "")

    def end(self) -> None:
        """Take it away."""
        if self._open and self._write:
            self._write("\r\033[K")
            self._open = False


def _to_terminal(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass
