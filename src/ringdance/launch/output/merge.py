"""Show equal lines of several ranks once: ``[0-3] epoch 1``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringdance.launch.output.stream import Lines, Sink

WAIT_S = 0.3
"""How long a line waits for the same line of other ranks."""


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

    Args:
        sink: where the lines go.
        ranks: number of ranks: a line of all ranks waits no longer.
        clock: returns the time in seconds.
    """

    def __init__(self, sink: Sink, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._ranks, self._clock = sink, ranks, clock
        self._held: list[tuple[float, bytes, set[int]]] = []

    def sink_of(self, rank: int) -> Sink:
        """Return the sink for a rank's lines."""

        def take(data: bytes) -> None:
            lines = Lines()
            for line in [*lines.feed(data), *lines.end()]:
                self._take(rank, line)
            while self._held and len(self._held[0][2]) == self._ranks:
                self._show()

        return take

    def _take(self, rank: int, line: bytes) -> None:
        # After this rank's own last line, so that its lines stay in order.
        after = max((at for at, (_, _, ranks) in enumerate(self._held) if rank in ranks), default=-1)
        for _, held, ranks in self._held[after + 1 :]:
            if held == line:
                ranks.add(rank)
                return
        self._held.append((self._clock(), line, {rank}))

    def _show(self) -> None:
        _, line, ranks = self._held.pop(0)
        end = b"" if line.endswith((b"\n", b"\r")) else b"\n"
        self._sink(f"[{spans(list(ranks))}] ".encode() + line + end)

    def due(self) -> float | None:
        """Return when to call :meth:`flush`, by the clock, or None if no line is held."""
        return self._held[0][0] + WAIT_S if self._held else None

    def flush(self, everything: bool = False) -> None:
        """Show the lines that have waited long enough."""
        while self._held and (everything or self._clock() >= self._held[0][0] + WAIT_S):
            self._show()
