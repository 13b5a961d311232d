"""What the ranks of ``ringdance.run`` return: a file for each, in the job's folder until it is removed."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

from ringdance.errors import LaunchError

_OPEN = 200  # files at once


class Results:
    """Takes them from the job's folder of this host, and from the other hosts in parts of bounded size.

    Attributes:
        kept: whether all that have come are open.
    """

    def __init__(self) -> None:
        self.kept = False
        self._files: dict[str, BinaryIO] = {}

    def take(self, folder: str, name: str, data: bytes, last: bool) -> None:
        """Put a part of another host's file, or its end, into the folder.

        Raises:
            LaunchError: it has no room.
        """
        path = os.path.join(folder, name)
        try:
            with open(f"{path}.part", "ab") as file:
                file.write(data)
            if last:
                os.rename(f"{path}.part", path)
        except OSError as error:
            raise LaunchError(
                f"what a rank returned cannot be kept in {folder}: {error.strerror}. "
                "Set TMPDIR to a directory with more room"
            ) from None

    def keep(self, folder: str) -> None:
        """Open all that are whole: open files can be read when the folder is gone."""
        self.kept = True
        for path in Path(folder).glob("result.*.pkl"):
            # With so many ranks, what each returns is small.
            many = len(self._files) >= _OPEN
            self._files[path.name] = io.BytesIO(path.read_bytes()) if many else path.open("rb")

    def load(self, ranks: int) -> list[Any]:
        """What they returned, by rank.

        Raises:
            LaunchError: some have ended before they returned anything.
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
