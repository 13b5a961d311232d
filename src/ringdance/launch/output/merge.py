"""Show equal lines of several ranks once: ``[0-3] epoch 1``."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ringdance.launch.output.stream import Sink

WAIT_S = 0.3
"""How long a line waits for the same line of other ranks."""

MOST = 4000
"""How many lines wait; of more the oldest are shown."""


def spans(numbers: Sequence[int]) -> str:
    """Return ``0-3,5`` for 0, 1, 2, 3, 5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in found)


class LineMerger:
    """Hold lines for a moment and show equal ones together; the lines of each rank keep their order.

    The work for a line does not grow with the number of those that are held.

    Args:
        sink: where the lines go.
        ranks: number of ranks: a line of all ranks waits no longer.
        clock: returns the time in seconds.
    """

    def __init__(self, sink: Sink, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._ranks, self._clock = sink, ranks, clock
        self._held: dict[int, tuple[float, bytes, list[int]]] = {}  # by consecutive numbers, from `_first` on
        self._first = 0
        self._numbers: dict[bytes, list[int]] = {}  # of the lines that are held, ascending
        self._last: dict[int, int] = {}  # by rank: the number of its last line

    def sink_of(self, rank: int) -> Sink:
        """Return the sink for a rank's lines."""

        def take(data: bytes) -> None:
            now = self._clock()
            for line in data.splitlines(keepends=True):
                self._take(rank, line, now)
            self.flush()

        return take

    def _take(self, rank: int, line: bytes, now: float) -> None:
        numbers = self._numbers.setdefault(line, [])
        # After this rank's own last line, so that its lines stay in order.
        at = bisect_right(numbers, self._last.get(rank, -1))
        if at == len(numbers):
            numbers.append(self._first + len(self._held))
            self._held[numbers[at]] = now, line, []
        self._held[numbers[at]][2].append(rank)
        self._last[rank] = numbers[at]

    def due(self) -> float | None:
        """Return when to call :meth:`flush`, by the clock, or None if no line is held."""
        return self._held[self._first][0] + WAIT_S if self._held else None

    def flush(self, everything: bool = False) -> None:
        """Show the lines that have waited long enough, are too many, or have come from all ranks."""
        shown, before = list[bytes](), self._clock() - WAIT_S
        while self._held:
            came, line, ranks = self._held[self._first]
            if not (everything or came <= before or len(ranks) == self._ranks or len(self._held) > MOST):
                break
            del self._held[self._first], self._numbers[line][0]
            self._first += 1
            if not self._numbers[line]:
                del self._numbers[line]
            end = b"" if line.endswith((b"\n", b"\r")) else b"\n"
            shown.append(f"[{spans(ranks)}] ".encode() + line + end)
        if shown:
            self._sink(b"".join(shown))
