"""A cache of open data files, bounded by the process's limit on open files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from ringdance.errors import ArgumentError
from ringdance.host.limits import raise_open_files

T = TypeVar("T")
_SHARE, _MOST = 4, 4096  # limit the cache to 1/4 of the process's limit on open files, and to 4096 files


class OpenFiles(Generic[T]):
    """Keeps the most recently used files open. Thread-safe.

    A file that is dropped from the cache while threads are using it stays open until they have finished.

    Args:
        name: Returns a file's path, given its number.
        open: Opens a file, given its number and path. The result must close the file when its last
            reference is dropped.
        count: Number of files. Raises the process's soft limit on open files if necessary.
    """

    def __init__(self, name: Callable[[int], Path], open: Callable[[int, Path], T], count: int) -> None:
        self._name, self._open = name, open
        share = raise_open_files(min(count, _MOST) * _SHARE) // _SHARE
        self._files = lru_cache(max(1, min(share, _MOST)))(self._opened)

    def __call__(self, number: int) -> T:
        """Return an open file.

        Raises:
            ArgumentError: The file cannot be opened.
        """
        return self._files(number)

    def clear(self) -> None:
        """Drop all files from the cache. They are opened again when needed."""
        self._files.cache_clear()

    def _opened(self, number: int) -> T:
        name = self._name(number)
        try:
            return self._open(number, name)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._files.cache_info().currsize:
                self.clear()  # the process has reached its limit, perhaps because of other code
                return self._opened(number)
            raise ArgumentError(f"{name}: {error.strerror or error}. {_fix(error)}") from None


class Files:
    """Base class of splits that keep files open. Copies and unpickled objects open the files again."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without the open files."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, OpenFiles)}


def _fix(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = raise_open_files(0)
        return (
            f"The limit of this process is {limit} (`ulimit -n`), and no file of this data set is open. "
            f"Raise the limit, or look in /proc/{os.getpid()}/fd to see which files are open."
        )
    if error.errno == errno.ENOENT:
        return "The index lists this file. Check whether the data set was copied completely."
    return "The index lists this file. Check whether this user may read it on this host."
