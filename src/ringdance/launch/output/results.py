"""Collect what the ranks of ``ringdance.run`` return: a file for each in the job's directory."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

from ringdance.errors import LaunchError
from ringdance.launch.output.stream import Sink

_OPEN = 200  # files at once


class CollectedFile:
    """Write a file that comes from another host in chunks.

    Args:
        path: of the file, which is overwritten.
        err: takes a line about what is wrong.
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
    """Collect results from the job's directory on this host, and from other hosts in chunks.

    Attributes:
        kept: whether all results are open.
    """

    def __init__(self) -> None:
        self.kept = False
        self._files: dict[str, BinaryIO] = {}

    def take(self, directory: str, name: str, data: bytes, last: bool) -> None:
        """Append a chunk to another host's file in the directory; `last` completes the file.

        Raises:
            LaunchError: there is no room.
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
                "Set TMPDIR to a directory with more room"
            ) from None

    def keep(self, directory: str) -> None:
        """Open all complete files: they can be read after the directory is removed."""
        self.kept = True
        for path in Path(directory).glob("result.*.pkl"):
            # With so many ranks, each result is small.
            many = len(self._files) >= _OPEN
            self._files[path.name] = io.BytesIO(path.read_bytes()) if many else path.open("rb")

    def load(self, ranks: int) -> list[Any]:
        """Return the results by rank.

        Raises:
            LaunchError: a rank ended without a result.
        """
        names = [f"result.{rank}.pkl" for rank in range(ranks)]
        missing = [rank for rank, name in enumerate(names) if name not in self._files]
        if missing:
            raise LaunchError(
                f"ranks {missing} ended with exit code 0 before the function returned (sys.exit in it?)"
            )
        return [pickle.load(self._files[name]) for name in names]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
