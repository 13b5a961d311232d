"""Rows of click logs from named pipes, as in the Pipe mode of SageMaker.

The service makes a pipe ``/opt/ml/input/data/CHANNEL_NUMBER`` for each channel and epoch, with numbers from
0, and writes all objects of the channel into it, one behind the other. Two readers of one pipe would each get
a part at random, so that a reader locks its pipe.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ringdance.data import tfrecord
from ringdance.data.tables.formats import FORMATS
from ringdance.data.tables.rows import PADDING, Array, RowError, Rows
from ringdance.errors import ArgumentError

_MAGIC = struct.pack("<I", 0xCED7230A)  # begins each record of RecordIO
_PIECE = 1 << 20  # bytes that are parsed at once, or more if a record is larger
_ROWS = 4096  # the same in rows
_POLL_MS = 500


class Pipe:
    """A named pipe, open for reading, before or after its writer.

    Args:
        path: of the pipe.
        timeout: seconds in which it must be there.

    Attributes:
        path: of the pipe.
        identity: device and inode, the same for all who open it on a host.
        locked_by: who else reads it, or "".

    Raises:
        ArgumentError: it is missing, or no pipe.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if not path.exists() or not stat.S_ISFIFO(path.stat().st_mode):
            names = sorted(one.name for one in path.parent.glob("*"))[:10]
            why = "is no named pipe" if path.exists() else f"is not there after {timeout:g} s"
            raise ArgumentError(
                f"{path} {why}; {path.parent} has {', '.join(names) or 'nothing'}. Is the InputMode of the "
                "channel Pipe? In other modes open its directory with ringdance.data.Table.open"
            )
        # Without O_NONBLOCK it would wait for a writer, before two readers of a pipe are detected.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.path, about = path, os.fstat(self._descriptor)
        self.identity, self.locked_by = [about.st_dev, about.st_ino], ""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.locked_by = _holder(about.st_ino) or "another process"

    def pieces(self, stopped: Callable[[], bool]) -> Iterator[bytes]:
        """Yield what is written until the writer closes the pipe, or until `stopped`."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while not stopped():
            # Before the first writer there is no event; after the last one POLLHUP, and nothing to read.
            if poll.poll(_POLL_MS):
                data = os.read(self._descriptor, _PIECE)
                if not data:
                    return
                yield data

    def close(self) -> None:
        """Close it, which ends the lock; a writer that is not done fails with EPIPE."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _holder(inode: int) -> str:
    """Return the process that has locked a file, by /proc/locks."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    found = [line.split() for line in lines if f":{inode} " in line and "->" not in line]
    return f"process {found[0][4]}" if found else ""


def rows(name: object, pieces: Iterator[bytes], fields: int, table_size: int) -> Iterator[Rows]:
    """Yield rows of any of the formats csv, libsvm and tfrecord, also within RecordIO.

    Args:
        name: of the source, for errors.
        pieces: its bytes.
        fields: pairs of each row.
        table_size: ids are below it.

    Raises:
        ArgumentError: a row is broken, or the data end within one.
    """
    stream = _Stream(pieces)
    if stream.peek(4) == _MAGIC:
        stream = _Stream(_unwrapped(name, stream))
    head = stream.peek(_PEEKED)
    line = head.partition(b"\n")[0]
    format = "tfrecord" if tfrecord.is_head(head[:12]) else "libsvm" if b":" in line else "csv"
    form, number, rest = FORMATS[format], 0, b""
    while (block := stream.read(_PIECE)) or rest:
        rest += block
        if not block and format == "tfrecord":
            raise ArgumentError(f"{name}: it ends within {form.unit} {number + 1}: was its writer stopped?")
        if not block:
            rest += b"\n"  # the last line has none
        data = rest[: _complete(rest, format)]
        rest = rest[len(data) :]
        if format == "csv":  # without the names at the beginning of each file
            data = re.sub(rb"(?m)^label[,\t].*\n", b"", data.translate(_COMMAS))
        data = data if format == "tfrecord" else data.replace(b"\r\n", b"\n")
        array = np.frombuffer(data + bytes(PADDING), np.uint8)
        starts = form.bounds(array[: len(data)])
        for at in range(0, len(starts) - 1, _ROWS):
            some = starts[at : at + _ROWS + 1]
            try:
                yield _parse(format, array, some, fields, table_size)
            except RowError:
                for row in range(len(some) - 1):  # which one?
                    try:
                        _parse(format, array, some[row : row + 2], fields, table_size)
                    except RowError as error:
                        where = f"{name}, {form.unit} {number + at + row + 1}"
                        raise ArgumentError(f"{where} (without lines of names): {error}") from None
                raise
        number += len(starts) - 1


_PEEKED = 4096
_COMMAS = bytes.maketrans(b"\t", b",")


def _parse(format: str, data: Array, starts: Array, fields: int, table_size: int) -> Rows:
    some = np.append(data[starts[0] : starts[-1]], np.zeros(PADDING, np.uint8))
    found = FORMATS[format].parse(some, starts - starts[0], fields, table_size)
    found.check(table_size)
    return found


def _complete(data: bytes, format: str) -> int:
    """Return the size of the whole rows at the beginning of `data`."""
    if format != "tfrecord":
        return data.rfind(b"\n") + 1
    at = 0
    while at + 12 <= len(data) and (end := at + 16 + struct.unpack_from("<Q", data, at)[0]) <= len(data):
        at = end
    return at


def _unwrapped(name: object, stream: _Stream) -> Iterator[bytes]:
    """Yield what records of RecordIO hold: parts of files, or an Example each, which becomes a TFRecord.

    A record is: a magic number, its length (29 bits) and part (3 bits: 0 whole, 1 first, 2 middle, 3 last),
    the data, zeros up to a multiple of 4 bytes. Parts are divided where the data had the magic number.
    """
    parts: list[bytes] = []
    while head := stream.read(8):
        length = int.from_bytes(head[4:], "little")
        part, length = length >> 29, length & (1 << 29) - 1
        data = stream.read(length)
        if head[:4] != _MAGIC or len(head) < 8 or len(data) < length:
            raise ArgumentError(f"{name}: damaged RecordIO: a record has no magic number, or is not complete")
        stream.read(-length % 4)
        parts.append(data)
        if part in (0, 3):
            whole = _MAGIC.join(parts)
            parts.clear()
            if whole[:1] == b"\n" and not tfrecord.is_head(whole[:12]):
                yield tfrecord.framed(whole)
            else:
                yield whole


class _Stream:
    """Bytes that come in pieces, read in other portions."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._parts, self._size = pieces, [b""], 0

    def _fill(self, count: int) -> bytes:
        while self._size < count and (piece := next(self._pieces, b"")):
            self._parts.append(piece)
            self._size += len(piece)
        self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def peek(self, count: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        return self._fill(count)[:count]

    def read(self, count: int) -> bytes:
        """Take the next bytes; fewer at the end."""
        data = self._fill(count)
        self._parts = [data[count:]]
        self._size = len(self._parts[0])
        return data[:count]
