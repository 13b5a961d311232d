"""The files of a data set that a process has open: those it used last, as many as its limit allows."""

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
_SHARE, _MOST = 4, 4096  # of the limit, for each split; of files, however high the limit is


class OpenFiles(Generic[T]):
    """Keeps the files that were used last. Any thread may call it.

    Who closes a file is the last thread that uses it: one that is dropped here meanwhile stays open until
    then.

    Args:
        name: returns a file's path by its number.
        open: opens the file of a number and path; what it returns closes it with its last reference.
        count: files that there are. If the process may not have all of them open, its soft limit is raised.
    """

    def __init__(self, name: Callable[[int], Path], open: Callable[[int, Path], T], count: int) -> None:
        self._name, self._open = name, open
        share = raise_open_files(min(count, _MOST) * _SHARE) // _SHARE
        self._files = lru_cache(max(1, min(share, _MOST)))(self._opened)

    def __call__(self, number: int) -> T:
        """Return an open file.

        Raises:
            ArgumentError: it cannot be opened.
        """
        return self._files(number)

    def clear(self) -> None:
        """Drop all; they are opened again when they are used."""
        self._files.cache_clear()

    def _opened(self, number: int) -> T:
        name = self._name(number)
        try:
            return self._open(number, name)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._files.cache_info().currsize:
                self.clear()  # others have taken the rest
                return self._opened(number)
            raise ArgumentError(f"{name}: {error.strerror or error}. {_fix(error)}") from None


class Files:
    """A split with open files, which each process opens for itself."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled or copied."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, OpenFiles)}


def _fix(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = raise_open_files(0)
        return (
            f"The limit of this process is {limit} (`ulimit -n`), no file of this data set is open: "
            f"raise it, or see in /proc/{os.getpid()}/fd what holds them."
        )
    if error.errno == errno.ENOENT:
        return "The index names it: is the copy of the data complete?"
    return "The index names it: can this user read it on this host?"
