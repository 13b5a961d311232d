"""Collect the return values of ``ringdance.run`` from the ranks: one file each in the job's directory."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

from ringdance.errors import LaunchError
from ringdance.launch.output.stream import Sink

_OPEN = 200  # maximum number of open files


class CollectedFile:
    """Writes a file that arrives from another host in chunks.

    Args:
        path: Path of the file, which is overwritten.
        err: Receives a line about any problem.
    """

    def __init__(self, path: str, err: Sink) -> None:
        self._path, self._err, self._mode = path, err, "wb"

    def take(self, data: bytes) -> None:
        """Append a chunk."""
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
            with open(self._path, self._mode) as file:
                file.write(data)
        except OSError as error:
            self._err(f"ringdance: {self._path}: {error.strerror}\n".encode())
        self._mode = "ab"


class Results:
    """Collects results from the job's directory on this host, and from other hosts in chunks.

    Attributes:
        kept: True once all results are open.
    """

    def __init__(self) -> None:
        self.kept = False
        self._files: dict[str, BinaryIO] = {}

    def take(self, directory: str, name: str, data: bytes, last: bool) -> None:
        """Append a chunk to another host's file in the directory. ``last`` completes the file.

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
                f"cannot keep a rank's result in {directory}: {error.strerror}. "
                "Set TMPDIR to a directory with more space"
            ) from None

    def keep(self, directory: str) -> None:
        """Open all complete files, so that they stay readable after the directory is removed."""
        self.kept = True
        for path in Path(directory).glob("result.*.pkl"):
            # With this many ranks, each result is small enough for memory.
            many = len(self._files) >= _OPEN
            self._files[path.name] = io.BytesIO(path.read_bytes()) if many else path.open("rb")

    def load(self, ranks: int) -> list[Any]:
        """Return the results by rank.

        Raises:
            LaunchError: A rank exited without a result.
        """
        names = [f"result.{rank}.pkl" for rank in range(ranks)]
        missing = [rank for rank, name in enumerate(names) if name not in self._files]
        if missing:
            raise LaunchError(
                f"ranks {missing} exited with code 0 before the function returned. Does it call sys.exit()?"
            )
        return [pickle.load(self._files[name]) for name in names]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
