"""Share the launcher's stdout and stderr among the ranks without mixing their unfinished lines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ringdance.launch.output.stream import Sink, guarded

LAUNCHER = -1
"""Number used in place of a rank for the launcher's own lines."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """The launcher's stdout and stderr, shared by the ranks.

    On a terminal, output that ends in a carriage return (a progress bar) is shown on a separate line for each
    rank, below all other lines. In files and pipes, a newline is inserted if a rank writes after another
    rank's unfinished line.

    Args:
        sinks: Sinks for stdout and stderr. A sink that fails, except with BrokenPipeError, is not used again.
        terminals: For each sink, True if it is a terminal that supports ANSI escapes. If both are terminals,
            they must be the same terminal.
    """

    def __init__(self, sinks: tuple[Sink, Sink], terminals: Sequence[bool] = (False, False)) -> None:
        out: Sink = guarded("stdout", sinks[0], lambda line: err(line))
        err = guarded("stderr", sinks[1], out)
        self._sinks, self._terminals = (out, err), terminals
        self._begun: dict[int, int] = {}  # the rank that wrote each stream's unfinished line
        self._bars: dict[tuple[int, int], bytes] = {}  # progress bars by rank and stream
        self._drawn = 0  # number of progress bars drawn above the cursor

    def of(self, stream: int, rank: int = LAUNCHER) -> Sink:
        """Return the sink for a rank's output on a stream: 0 for stdout, 1 for stderr."""
        show = self._draw if self._terminals[stream] else self._join
        return lambda data: show(stream, rank, data)

    def show(self, text: str) -> None:
        """Show a line from the launcher on stderr."""
        self.of(1)(f"ringdance: {text}\n".encode())

    def _join(self, stream: int, rank: int, data: bytes) -> None:
        others = self._begun.pop(stream, rank) != rank
        if not data.endswith(b"\n"):
            self._begun[stream] = rank
        self._sinks[stream](b"\n" + data if others else data)

    def _draw(self, stream: int, rank: int, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if not rest.endswith(b"\r"):
            lines, rest = [*lines, *([rest] if rest else [])], b""
        if lines:
            self._bars.pop((rank, stream), None)
        if rest:
            self._bars[rank, stream] = _last(rest)
        columns, rows = _size(stream + 1)
        bars = [_cut(self._bars[key], columns) for key in sorted(self._bars)][: max(1, rows - 2)]
        erase = b"\033[%dA\033[J" % self._drawn if self._drawn else b""
        self._drawn = len(bars)
        self._sinks[stream](erase + b"".join(line + b"\n" for line in [*map(_last, lines), *bars]))

    def freeze(self) -> None:
        """Leave the progress bars on the terminal after the ranks have exited."""
        self._bars.clear()
        self._drawn = 0


def _last(line: bytes) -> bytes:
    """Return the text after the last carriage return in a line, which is what a terminal shows."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _cut(bar: bytes, columns: int) -> bytes:
    """Truncate a progress bar to one line, because text that wraps to the next line could not be erased."""
    text = _ESCAPES.sub("", bar.decode(errors="replace"))
    return bar if len(text) < columns else text[: columns - 1].encode()


def _size(descriptor: int) -> tuple[int, int]:
    """Return the terminal's width and height. Uses defaults if a pseudo-terminal reports 0."""
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24
