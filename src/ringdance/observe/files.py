"""Read files that a job has left, which may be damaged or no files at all."""

from __future__ import annotations

import os
from pathlib import Path

from ringdance.errors import LaunchError

NO_FORMAT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a file raises whose content is not as expected."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise a LaunchError if a file is there and no regular one, such as a pipe, which may never end."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise LaunchError(f"{path} is no regular file: copy what comes from it into one")


def read_regular(path: Path) -> str:
    """Return a file's text. Raises LaunchError if it cannot be read or is no regular file."""
    check_regular(path)
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror or error}") from None
