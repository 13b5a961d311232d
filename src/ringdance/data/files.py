"""Write data files atomically, and compute checksums."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ringdance.errors import ArgumentError, optional
from ringdance.host.files import whole_file


@cache
def needed(module: str) -> ModuleType:
    """Import and return a module from an optional package.

    Raises:
        ArgumentError: The package is not installed.
    """
    return optional(module, ArgumentError, package="pillow" if module.startswith("PIL") else "")


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of ``data``, or extend ``crc``, the CRC-32C of the bytes before ``data``."""
    return needed("google_crc32c").extend(crc, data)


def file_crc32c(path: Path) -> int:
    """Return the CRC-32C of a file."""
    return _file_checksum(path, crc32c)


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file. Unlike ``file_crc32c``, this needs no optional package."""
    return _file_checksum(path, zlib.crc32)


def _file_checksum(path: Path, extend: Callable[[bytes, int], int]) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            crc = extend(chunk, crc)
    return crc


def why_not(error: Exception, directory: Path) -> str:
    """Explain why writing to a directory failed. Includes the free disk space."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        text = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    with contextlib.suppress(OSError):
        text += f" ({shutil.disk_usage(directory).free / 1e6:,.0f} MB are free in {directory})"
    return text


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Writes a file that appears under its final name only once it is complete and on disk.

    Args:
        path: Final path.

    Attributes:
        size: Bytes written so far.
        crc32c: CRC-32C of all bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        self._extend = needed("google_crc32c").extend
        self._whole = whole_file(path, "wb", synced=True, buffering=1 << 20)
        self._file = self._whole.__enter__()
        self.size = self.crc32c = 0

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self.size += len(data)
        self.crc32c = self._extend(self.crc32c, data)

    def sync(self) -> None:
        """Wait until all written bytes are on disk. Raises OSError, for example if the disk is full."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait until the file is on disk, and then rename it. After an error, remove it instead.

        Raises:
            OSError: The file could not be written, for example because the disk is full. The message
                names the file.
        """
        self._whole.__exit__(kind, error, trace)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    """Serialize an array in the ``.npy`` format."""
    memory = io.BytesIO()
    np.save(memory, array)
    return memory.getvalue()


def write_whole(path: Path, data: bytes) -> int:
    """Write a small file atomically. Returns its CRC-32C."""
    with ShardWriter(path) as file:
        file.write(data)
    return file.crc32c
