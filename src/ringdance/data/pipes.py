"""Rows of click logs from named pipes, as in the Pipe mode of SageMaker.

The service makes a pipe ``/opt/ml/input/data/CHANNEL_NUMBER`` for each channel and epoch, with numbers from
0, and writes all objects of the channel into it, one behind the other. Two readers of one pipe would each get
a part at random, so that a reader locks its pipe.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringdance.data.tables import examples, lines
from ringdance.data.tables.formats import FORMATS, format_of, parse
from ringdance.data.tables.rows import RowError, Rows
from ringdance.errors import ArgumentError

_PIECE = 1 << 20  # bytes that are parsed at once, or more if a record is larger
_POLL_MS = 500


class Pipe:
    """A named pipe, open for reading, before or after its writer.

    Args:
        paths: of the pipe; the first that is there.
        timeout: seconds in which it must be there.

    Attributes:
        path: of the pipe.
        identity: device and inode, the same for all who open it on a host.
        locked: whether another process reads it.

    Raises:
        ArgumentError: it is missing, or no pipe.
    """

    def __init__(self, paths: Sequence[Path], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not (there := [path for path in paths if path.exists()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        path = [*there, *paths][0]
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
        self.identity, self.locked = [about.st_dev, about.st_ino], False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.locked = True

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
        os.close(self._descriptor)


def rows(name: object, pieces: Iterator[bytes], fields: int, table_size: int) -> Iterator[Rows]:
    """Yield rows of any of the formats csv, libsvm and tfrecord.

    Args:
        name: of the source, for errors.
        pieces: its bytes.
        fields: pairs of each row.
        table_size: ids are below it.

    Raises:
        ArgumentError: a row is broken, or the data end within one.
    """
    stream = io.BufferedReader(_Pieces(name, pieces), _PIECE)
    format, number = format_of(stream.peek()), 0
    for data in (examples if format == "tfrecord" else lines).pieces(stream, _PIECE):
        if format == "csv":  # without the names at the beginning of each file
            data = re.sub(rb"(?m)^label[,\t].*\n", b"", data)
        count, parsed = parse(format, data, fields, table_size)
        for row, found in parsed:
            if isinstance(found, RowError):
                where = f"{name}, {FORMATS[format].unit} {number + row + 1}"
                raise ArgumentError(f"{where} (without lines of names): {found}")
            yield found
        number += count


class _Pieces(io.RawIOBase):
    def __init__(self, name: object, pieces: Iterator[bytes]) -> None:
        self.name, self._pieces, self._rest = name, pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, unless the end comes before."""
        count = 0
        while count < len(buffer) and (piece := self._rest or next(self._pieces, b"")):
            some = piece[: len(buffer) - count]
            buffer[count : count + len(some)] = some
            count, self._rest = count + len(some), piece[len(some) :]
        return count
