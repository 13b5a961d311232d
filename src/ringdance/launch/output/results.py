"""Collect the files that ranks write to the job's directory on their hosts: results and output files."""

from __future__ import annotations

import fcntl
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ringdance.errors import LaunchError
from ringdance.host.directories import OUTPUT, TIMELINE
from ringdance.launch.hosts import ranks_text
from ringdance.launch.output.stream import remove_left

_OPEN = 200  # maximum number of open files


class OutputDirectory:
    """The directory for ``--output-filename``. Also stores the output files that other hosts send.

    The directory is locked (see ``_locked()``).

    Args:
        path: Path of the directory, if any. It is created, and files from an earlier job are removed.
        timeline: Path of the timeline file, which another host may send.
        show: Called with a line that describes a problem.

    Raises:
        LaunchError: The directory cannot be created, or another job holds the lock.
    """

    def __init__(self, path: str, timeline: str, show: Callable[[str], None]) -> None:
        self.path, self._timeline, self._show = path, timeline, show
        self._begun: set[str] = set()
        self._lock = -1
        try:
            if path:
                os.makedirs(path, exist_ok=True)
                self._lock = _locked(path)
                remove_left(Path(path))
        except OSError as error:
            raise LaunchError(f"--output-filename {path}: {error.strerror}") from None

    def take(self, name: str, data: bytes) -> bool:
        """Append data to a file sent by another host. Returns False for other kinds of files."""
        timeline = name.startswith(TIMELINE)
        if not timeline and not name.startswith(f"{OUTPUT}/"):
            return False
        path = self._timeline if timeline else self.path + name[len(OUTPUT) :]
        mode = "ab" if name in self._begun else "wb"
        self._begun.add(name)
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(path, mode) as file:
                file.write(data)
        except OSError as error:
            self._show(f"{path}: {error.strerror}")
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)


class Results:
    """Collects results from the job's directory on this host, and from other hosts in chunks.

    Attributes:
        kept: True once ``keep()`` is called.
    """

    def __init__(self) -> None:
        self.kept = False
        self._files: dict[str, BinaryIO] = {}

    def take(self, directory: str, name: str, data: bytes, last: bool) -> None:
        """Append a chunk to a file sent by another host. ``last`` is True for the file's last chunk.

        Raises:
            LaunchError: There is not enough space.
        """
        path = os.path.join(directory, name)
        try:
            with open(f"{path}.part", "ab") as file:
                file.write(data)
            if last:
                os.rename(f"{path}.part", path)
        except OSError as error:
            raise LaunchError(
                f"cannot store a rank's result in {directory}: {error.strerror}. "
                "Set TMPDIR to a directory with more space."
            ) from None

    def keep(self, directory: str) -> None:
        """Open all complete files, so that they remain readable after the directory is removed."""
        self.kept = True
        for path in Path(directory).glob("result.*.pkl"):
            # With this many ranks, assume that each result is small enough to be kept in memory.
            many = len(self._files) >= _OPEN
            self._files[path.name] = io.BytesIO(path.read_bytes()) if many else path.open("rb")

    def load(self, ranks: int) -> list[Any]:
        """Return the results in rank order.

        Raises:
            LaunchError: A rank exited without storing a result.
        """
        names = [f"result.{rank}.pkl" for rank in range(ranks)]
        missing = [rank for rank, name in enumerate(names) if name not in self._files]
        if missing:
            raise LaunchError(
                f"{ranks_text(missing)} exited with code 0 before the function returned. "
                "Check whether the function calls sys.exit()."
            )
        return [pickle.load(self._files[name]) for name in names]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _locked(directory: str) -> int:
    """Open and lock an output directory, so that no other job writes to it.

    Has no effect on file systems that do not support locks.

    Returns:
        The file descriptor that holds the lock.

    Raises:
        LaunchError: Another job holds the lock.
    """
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise LaunchError(
            f"--output-filename {directory}: another job is writing its output there. Use another directory."
        ) from None
    except OSError:  # the file system does not support locks
        pass
    return opened
