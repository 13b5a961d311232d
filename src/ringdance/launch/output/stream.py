"""Show the ranks' output on one terminal, with each line prefixed by its rank, and copy it to files.

By default, a line from rank 1 becomes ``[1] text`` on the stream to which the rank wrote it. ``Style``
defines other formats. The order of lines within a stream is preserved, and a newline is appended to an
unfinished last line. A carriage return also ends a line, so that progress bars stay readable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from ringdance.launch.cause import MARK, OUTCOME_FILE, Cause, parse_mark

Sink = Callable[[bytes], None]

_LONGEST = 8 << 20
# First lines of the traceback of an uncaught exception, and of faulthandler's dump after a fatal signal.
_TRACEBACKS = (b"Traceback (most recent call last):", b"Fatal Python error: ")
_LOST_PEER = re.compile(rb"NBC_Progress: an error -?\d+ was found|Error in NBC_Start_round")
"""Printed by Open MPI when a peer has died, sometimes with an empty line. The rank's own error says more."""
_HELD_S = 3.0
"""Seconds to hold back a traceback. If the rank exits because of it, only the final report shows it."""
_LEFT = (
    "rank.*/stdout", "rank.*/stderr", "metrics-*.jsonl", OUTCOME_FILE, "ringdance-flight-rank*.json",
    "ringdance-stall-rank*.json", "ringdance-stacks-rank*.txt",
)  # fmt: skip
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def write_all(descriptor: int) -> Sink:
    """Return a sink that writes all data to a file descriptor, even a non-blocking one."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:  # O_NONBLOCK was set by a process sharing the pipe or terminal
                select.select([], [descriptor], [])

    return write


def guarded(name: str, sink: Sink, warn: Sink) -> Sink:
    """Return a sink that warns once and then drops all data if ``sink`` fails, for example on a full disk.

    Args:
        name: Name of the file or stream, for the warning.
        sink: The sink to guard. A BrokenPipeError is propagated.
        warn: Sink for the warning.
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
                f"ringdance: cannot write to {name}: {error.strerror}. The job continues, but nothing "
                "more is written there\n".encode()
            )

    return write


class Lines:
    """Splits a stream into lines that end in a newline or a carriage return. Buffers an unfinished line."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the complete lines with their endings. Over 8 MiB without an ending counts as a line."""
        # A carriage return at the end of the data may be the first half of "\r\n".
        until = len(data) - data.endswith(b"\r")
        cut = max(data.rfind(b"\n", 0, until), data.rfind(b"\r", 0, until)) + 1
        starts_line = bool(self._held) and self._held[-1].endswith(b"\r")
        if not cut and not starts_line:
            self._held.append(data)
            self._size += len(data)
            return self.end() if self._size > _LONGEST else []
        complete = b"".join([*self._held, data[:cut]])
        self._held, self._size = [data[cut:]], len(data) - cut
        return re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)", complete)

    def end(self) -> list[bytes]:
        """Return the unfinished last line, if there is one."""
        rest = b"".join(self._held)
        self._held, self._size = [], 0
        return [rest] if rest else []


@dataclass(frozen=True)
class Style:
    """Format of the ranks' output lines.

    Attributes:
        prefix: Text before each line, in which ``{rank}``, ``{host}`` and ``{stream}`` (stdout or stderr) are
            replaced. ``{on_host}`` becomes ``<host>`` if the job has several hosts, and nothing otherwise.
        clock: If True, the local time precedes the prefix.
        closes: If True, a newline is appended to an unfinished last line.
        colour: ANSI (SGR) color number for the prefix on the launcher's stream, 0 for none. In a job's
            style, any other number means that the prefixes are colored by rank.
        json: If True, each line becomes a JSON object that starts with the prefix.
    """

    prefix: str = "[{rank}]{on_host} "
    clock: bool = False
    closes: bool = True
    colour: int = 0
    json: bool = False


class Stream:
    """One output stream of a rank.

    Args:
        sink: Sink for the launcher's stream.
        style: Format of the lines, with placeholders in the prefix already replaced.
        file: File that receives a copy of the output, or None.
        holds: If True, hold back tracebacks and parse marked lines that report a cause. Used for stderr.
        warn: Sink for a warning if the copy cannot be written. Default: ``sink``.
    """

    def __init__(
        self, sink: Sink, style: Style, file: BinaryIO | None = None, holds: bool = False,
        warn: Sink | None = None,
    ) -> None:  # fmt: skip
        self._sink, self._style, self._file, self._holds = sink, style, file, holds
        self._copy = guarded(str(file.name), write_all(file.fileno()), warn or sink) if file else None
        self._prefix = style.prefix.encode()
        self._shown = b"\033[%dm%s\033[0m" % (style.colour, self._prefix) if style.colour else self._prefix
        self._lines = Lines()
        self.held: list[bytes] = []
        self.held_until: float | None = None
        self.marks: list[Cause] = []
        self._last = b""
        self._skips_empty = False

    def feed(self, data: bytes) -> None:
        """Show and copy the complete lines of the rank's output."""
        self._take(self._lines.feed(data))

    def _take(self, lines: list[bytes]) -> None:
        if self._copy and lines:
            self._copy(b"".join(self._dress(line, shown=False) for line in lines))
        if self._holds:
            lines = self._sift(lines)
        if lines:
            self._sink(b"".join(map(self._dress, lines)))

    def _dress(self, line: bytes, shown: bool = True) -> bytes:
        if self._style.json:
            text = {"time": time.time(), "text": line.decode(errors="replace").rstrip("\r\n")}
            return self._prefix + json.dumps(text)[1:].encode() + b"\n"
        clock = time.ctime().encode() + b" " * self._style.closes if self._style.clock else b""
        return clock + (self._shown if shown else self._prefix) + line

    def _sift(self, lines: list[bytes]) -> list[bytes]:
        """Hold back tracebacks, and return the lines that can be shown now."""
        shown: list[bytes] = []
        for line in lines:
            mark = parse_mark(line) if MARK in line else None
            skips, self._skips_empty = self._skips_empty, bool(_LOST_PEER.match(line))
            if mark:
                self.marks.append(mark)
                continue
            if self._skips_empty or (skips and not line.strip()):
                continue
            self._last = line if line.strip() else self._last
            if self.held_until is not None:
                self.held.append(line)
            elif line.startswith(_TRACEBACKS):
                self.held, self.held_until = [line], time.monotonic() + _HELD_S
            else:
                shown.append(line)
        return shown

    def release(self) -> None:
        """Show the lines that were held back."""
        lines, self.held, self.held_until = self.held, [], None
        if lines:
            self._sink(b"".join(map(self._dress, lines)))

    def drop(self, shown: str) -> None:
        """Show the lines that were held back, except those in ``shown``, which are shown elsewhere."""
        lines = {line.strip() for line in shown.splitlines()}
        self.held = [line for line in self.held if line.decode(errors="replace").strip() not in lines]
        self.release()

    def last_words(self) -> str:
        """Return the traceback that is being held back, or an empty string if there is none."""
        return b"".join(self.held).decode(errors="replace").rstrip()

    def last_line(self) -> str:
        """Return the last line that is not blank, or an empty string if there is none. Requires ``holds``."""
        return self._last.decode(errors="replace").strip()

    def end(self) -> None:
        """Show and copy an unfinished last line, and close the file."""
        end = b"\n" if self._style.closes else b""
        self._take([line if line.endswith(b"\r") else line + end for line in self._lines.end()])
        if self._file:
            self._file.close()
            self._file = self._copy = None


def make_streams(
    rank: int, host: str, sinks: tuple[Sink, Sink], style: Style, directory: str, ranks: int, several: bool
) -> list[Stream]:
    """Create the streams for a rank's stdout and stderr.

    Args:
        rank: Number of the rank.
        host: Name of the rank's host.
        sinks: Sinks for the launcher's stdout and stderr.
        style: Format of the lines.
        directory: Directory for a copy of the output, if any.
        ranks: Number of ranks in the job.
        several: True if the job has several hosts.

    Raises:
        OSError: The rank's files in ``directory`` cannot be created.
    """
    files = open_files(Path(directory), rank, ranks) if directory else (None, None)
    colour = _COLOURS[rank % len(_COLOURS)] if style.colour else 0
    streams = []
    for which, name in enumerate(("stdout", "stderr")):
        if style.json:
            prefix = json.dumps({"rank": rank, "host": host, "stream": name})[:-1] + ", "
        else:
            on_host = f"<{host}>" if several else ""
            prefix = style.prefix.format(rank=rank, stream=name, host=host, on_host=on_host)
        own = replace(style, prefix=prefix, colour=colour)
        streams.append(Stream(sinks[which], own, files[which], which == 1, sinks[1]))
    return streams


def open_files(directory: Path, rank: int, ranks: int) -> tuple[BinaryIO, BinaryIO]:
    """Open ``directory/rank.<r>/stdout`` and ``stderr``, with r zero-padded to the highest rank's width.

    Raises:
        OSError: The files cannot be created.
    """
    own = directory / f"rank.{rank:0{len(str(ranks - 1))}d}"
    own.mkdir(parents=True, exist_ok=True)
    # Unbuffered, because the files must be complete even if the launcher is killed.
    return open(own / "stdout", "wb", buffering=0), open(own / "stderr", "wb", buffering=0)


def remove_left(directory: Path) -> None:
    """Remove an earlier job's files from an output directory, so that they are not mistaken for this job's.

    Raises:
        OSError: A file cannot be removed.
    """
    for left in _LEFT:
        for path in directory.glob(left):
            if path.is_file():
                path.unlink()
    for path in directory.glob("rank.*"):
        with contextlib.suppress(OSError):  # ignore if the directory is not empty
            path.rmdir()


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


class MpiexecOutput:
    """Shows mpiexec's own messages, except for the well-known ones that it prints at the end of a job.

    A message framed by two horizontal rules is shown or dropped as a whole.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lines = Lines()
        self._block: list[bytes] = []
        self.quiet = False
        self.unshown: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Show or drop the complete lines of mpiexec's output."""
        for line in self._lines.feed(data):
            self._take(line)

    def _take(self, line: bytes) -> None:
        if self._block:
            self._block.append(line)
            if _RULE.match(line):
                self._end_block()
        elif _RULE.match(line):
            self._block = [line]
        elif not _KNOWN.search(line) and line.strip():
            self._show([line])

    def _end_block(self) -> None:
        block, self._block = self._block, []
        if len(block) > 2 and not any(map(_KNOWN.search, block)):
            self._show(block)

    def _show(self, lines: list[bytes]) -> None:
        if self.quiet:
            self.unshown += lines
        else:
            self._sink(b"".join(lines))

    def end(self) -> None:
        """Show or drop the remaining output after mpiexec has exited."""
        for line in self._lines.end():
            self._take(line + b"\n")
        if self._block:
            self._block.append(b"")
            self._end_block()
