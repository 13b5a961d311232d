"""The same line from many ranks shown once: ``[0-3] epoch 1``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringdance.launch.output.stream import Lines, Sink

WAIT_S = 0.3
"""So long a line waits for the same line of other ranks."""


def spans(numbers: Sequence[int]) -> str:
    """``0-3,5`` for 0, 1, 2, 3, 5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in found)


class Fold:
    """Holds lines for a moment and shows equal ones together; the lines of each rank keep their order.

    Args:
        sink: where they go.
        ranks: how many ranks there are: a line of all of them waits no longer.
        clock: the time in seconds.
    """

    def __init__(self, sink: Sink, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._ranks, self._clock = sink, ranks, clock
        self._held: list[tuple[float, bytes, set[int]]] = []

    def of(self, rank: int) -> Sink:
        """Where that rank's lines are put in."""

        def take(data: bytes) -> None:
            lines = Lines()
            for piece in [*lines.feed(data), *lines.end()]:
                self._take(rank, piece)
            self._show_whole()

        return take

    def _take(self, rank: int, piece: bytes) -> None:
        # Behind this rank's own last line, so that its lines stay in order.
        after = max((at for at, (_, _, ranks) in enumerate(self._held) if rank in ranks), default=-1)
        for _, text, ranks in self._held[after + 1 :]:
            if text == piece:
                ranks.add(rank)
                return
        self._held.append((self._clock(), piece, {rank}))

    def _show_whole(self) -> None:
        while self._held and len(self._held[0][2]) == self._ranks:
            self._show()

    def _show(self) -> None:
        _, piece, ranks = self._held.pop(0)
        end = b"" if piece.endswith((b"\n", b"\r")) else b"\n"
        self._sink(f"[{spans(list(ranks))}] ".encode() + piece + end)

    def due(self) -> float | None:
        """When :meth:`flush` should be called (as of the clock), if anything is held."""
        return self._held[0][0] + WAIT_S if self._held else None

    def flush(self, everything: bool = False) -> None:
        """Show what has waited for long enough."""
        while self._held and (everything or self._clock() >= self._held[0][0] + WAIT_S):
            self._show()
