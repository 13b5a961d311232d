"""From many pipes to one terminal: whole lines, each with its rank, and per-rank files.

A line of rank 1 is shown as ``[1] text``: on stdout what the rank wrote to stdout, on stderr what
it wrote to stderr; :class:`Style` has other forms. Lines of one stream keep their order; a last line
without an end gets one. A carriage return ends a piece too, so progress bars stay readable.
"""

from __future__ import annotations

import json
import os
import re
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ringdance.launch.cause import MARK, Cause, parse_mark

Sink = Callable[[bytes], None]

_LONGEST = 8 << 20
# By Python for an uncaught exception, by its faulthandler for a fatal signal.
_TRACEBACKS = (b"Traceback (most recent call last):", b"Fatal Python error: ")
_LOST_PEER = re.compile(rb"NBC_Progress: an error -?\d+ was found|Error in NBC_Start_round")
"""What Open MPI prints, at times with an empty line after it, where a peer has died; the error says more."""
HELD_S = 3.0
"""A traceback on stderr waits so long, to be shown once, as the cause, should it be the rank's last words."""


def write_all(descriptor: int) -> Sink:
    """A sink that writes to a file descriptor, whole, and waits for a non-blocking one."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:  # a pipe or terminal that whoever started us shares with us
                select.select([], [descriptor], [])

    return write


def guarded(name: str, sink: Sink, warn: Sink) -> Sink:
    """Make a sink that gives up when it fails, as on a full disk: warns once, and writes nothing more.

    Args:
        name: of the file or stream, for people.
        sink: what may fail; a reader that has left (BrokenPipeError) is the caller's to see.
        warn: takes the line of the warning.
    """
    failed = False

    def write(data: bytes) -> None:
        nonlocal failed
        if failed:
            return
        try:
            sink(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            failed = True
            warn(
                f"ringdance: cannot write to {name}: {error.strerror}; nothing more is written there, "
                "and the job goes on\n".encode()
            )

    return write


class Lines:
    """Cuts a stream into pieces that end in a newline or a carriage return; keeps the rest for later."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Whole pieces, each with its end; a text of over 8 MiB without one is cut."""
        # A carriage return that comes last may be the first half of "\\r\\n": it waits.
        until = len(data) - data.endswith(b"\r")
        cut = max(data.rfind(b"\n", 0, until), data.rfind(b"\r", 0, until)) + 1
        starts_line = bool(self._held) and self._held[-1].endswith(b"\r")
        if not cut and not starts_line:
            self._held.append(data)
            self._size += len(data)
            return self.end() if self._size > _LONGEST else []
        whole = b"".join([*self._held, data[:cut]])
        pieces = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)", whole)
        self._held, self._size = [data[cut:]], len(data) - cut
        return pieces

    def end(self) -> list[bytes]:
        """The last piece, without its end, if there is one."""
        rest = b"".join(self._held)
        self._held, self._size = [], 0
        return [rest] if rest else []


@dataclass(frozen=True)
class Style:
    """How the ranks' lines are shown.

    Attributes:
        prefix: before each piece; ``{rank}``, ``{host}``, ``{stream}`` (stdout or stderr) are filled in.
        clock: whether the local time stands before the prefix.
        closes: whether a last piece without an end gets one.
        colour: the SGR number of the prefix's colour on the launcher's stream, 0 for none.
        json: each piece becomes a JSON object; the prefix is the first part of it.
    """

    prefix: str = "[{rank}] "
    clock: bool = False
    closes: bool = True
    colour: int = 0
    json: bool = False


WITH_RANK = Style()
WITH_HOST = Style("[{rank}]<{host}> ")


class Stream:
    """One output stream of one rank.

    Args:
        sink: the launcher's stream.
        style: how its pieces are shown, the prefix filled in.
        file: a copy goes there, None for nowhere.
        warn: takes a line if the copy cannot be written; default `sink`.
        holds: whether tracebacks are held back and marked lines understood (stderr).
        bare: whether the sink gets the pieces as they are; a file gets them with their prefix all the same.
    """

    def __init__(
        self,
        sink: Sink,
        style: Style,
        file: BinaryIO | None = None,
        holds: bool = False,
        bare: bool = False,
        warn: Sink | None = None,
    ) -> None:
        self._sink, self._style, self._file, self._holds, self._bare = sink, style, file, holds, bare
        self._copy = guarded(str(file.name), write_all(file.fileno()), warn or sink) if file else None
        self._prefix = style.prefix.encode()
        self._shown = b"\033[%dm%s\033[0m" % (style.colour, self._prefix) if style.colour else self._prefix
        self._lines = Lines()
        self.held: list[bytes] = []
        self.held_since: float | None = None
        self.marks: list[Cause] = []
        self._last = b""
        self._skips_empty = False

    def feed(self, data: bytes) -> None:
        """Take what the rank wrote."""
        self._take(self._lines.feed(data))

    def _take(self, pieces: list[bytes]) -> None:
        if self._copy and pieces:
            self._copy(b"".join(self._dress(piece, shown=False) for piece in pieces))
        if self._holds:
            pieces = self._sift(pieces)
        if pieces:
            self._sink(b"".join(map(self._dress, pieces)))

    def _dress(self, piece: bytes, shown: bool = True) -> bytes:
        if shown and self._bare:
            return piece
        if self._style.json:
            text = {"time": time.time(), "text": piece.decode(errors="replace").rstrip("\r\n")}
            return self._prefix + json.dumps(text)[1:].encode() + b"\n"
        clock = time.ctime().encode() if self._style.clock else b""
        return clock + (self._shown if shown else self._prefix) + piece

    def _sift(self, pieces: list[bytes]) -> list[bytes]:
        """What can be shown now."""
        shown: list[bytes] = []
        for piece in pieces:
            mark = parse_mark(piece) if MARK in piece else None
            skips, self._skips_empty = self._skips_empty, bool(_LOST_PEER.match(piece))
            if mark:
                self.marks.append(mark)
                continue
            if self._skips_empty or (skips and not piece.strip()):
                continue
            self._last = piece if piece.strip() else self._last
            if self.held_since is not None:
                self.held.append(piece)
            elif piece.startswith(_TRACEBACKS):
                self.held, self.held_since = [piece], time.monotonic()
            else:
                shown.append(piece)
        return shown

    def release(self) -> None:
        """Show what was held back."""
        pieces, self.held, self.held_since = self.held, [], None
        if pieces:
            self._sink(b"".join(map(self._dress, pieces)))

    def drop(self, told: str) -> None:
        """Show of what was held back only the lines that `told`, shown elsewhere, does not have."""
        lines = {line.strip() for line in told.splitlines()}
        self.held = [piece for piece in self.held if piece.decode(errors="replace").strip() not in lines]
        self.release()

    def last_words(self) -> str:
        """The traceback that is held back, or ""."""
        return b"".join(self.held).decode(errors="replace").rstrip()

    def last_line(self) -> str:
        """The last line that is not blank, or "" (known where tracebacks are held back)."""
        return self._last.decode(errors="replace").strip()

    def end(self) -> None:
        """The stream has ended: take its last piece."""
        end = b"\n" if self._style.closes else b""
        self._take([piece if piece.endswith(b"\r") else piece + end for piece in self._lines.end()])
        if self._file:
            self._file.close()
            self._file = self._copy = None


def open_files(folder: Path, rank: int, ranks: int) -> tuple[BinaryIO, BinaryIO]:
    """``folder/rank.<r>/stdout`` and ``stderr``; r zero-padded to the digits of the highest rank.

    Raises:
        OSError: they cannot be made.
    """
    place = folder / f"rank.{rank:0{len(str(ranks - 1))}d}"
    place.mkdir(parents=True, exist_ok=True)
    # Unbuffered: the files must be whole even if the launcher is killed.
    return open(place / "stdout", "wb", buffering=0), open(place / "stderr", "wb", buffering=0)


_RULE = re.compile(rb"[-=]{40,}\s*$")
_KNOWN = re.compile(
    rb"Primary job  ?terminated|prterun (has )?(detected|noticed)|mpirun (has )?(detected|noticed)"
    rb"|mpiexec noticed|^Killed\s*$|plm:(ssh|rsh): Warning: setpgid"
    rb"|MPI_ABORT was invoked|exited (on signal|without)|non-zero (exit )?(status|code)|Per user-direction"
    rb"|BAD TERMINATION|EXIT CODE:|CLEANING UP REMAINING|IGNORE THE BELOW|RUNNING AT|KILLED BY SIGNAL"
    rb"|APPLICATION TERMINATED WITH THE EXIT STRING|typically refers to a problem with your application"
    rb"|you have requested support for fault tolerance|help-mpi-ft\.txt"
    rb"|Please see the FAQ page|causing the job to be terminated|This does not necessarily mean"
)


class Banner:
    """What mpiexec itself says: its known epilogues are dropped, everything else is shown.

    A message between two rules is judged as a whole.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lines = Lines()
        self._block: list[bytes] = []
        self.quiet = False
        self.unshown: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take what mpiexec wrote."""
        for piece in self._lines.feed(data):
            self._take(piece)

    def _take(self, piece: bytes) -> None:
        if self._block:
            self._block.append(piece)
            if _RULE.match(piece):
                self._judge()
        elif _RULE.match(piece):
            self._block = [piece]
        elif not _KNOWN.search(piece) and piece.strip():
            self._show([piece])

    def _judge(self) -> None:
        block, self._block = self._block, []
        if any(_KNOWN.search(piece) for piece in block):
            return
        if len(block) > 2:
            self._show(block)

    def _show(self, pieces: list[bytes]) -> None:
        if self.quiet:
            self.unshown += pieces
        else:
            self._sink(b"".join(pieces))

    def end(self) -> None:
        """mpiexec has ended: judge what is left."""
        for piece in self._lines.end():
            self._take(piece + b"\n")
        if self._block:
            self._block.append(b"")
            self._judge()
