"""List what is copied: a file, or all that a directory contains."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringdance.errors import LaunchError


class Entry(NamedTuple):
    """A file, directory or link below the destination; all but `source` is sent to the agents.

    Attributes:
        path: relative to the destination; "" for the destination itself.
        kind: "file", "directory" or "link".
        size: of a file, in bytes.
        mode: permission bits.
        changed: time of modification, ns since the epoch.
        text: target of a link; SHA-256 of a file, where contents are compared.
        source: its path on this machine.
    """

    path: str
    kind: str
    size: int
    mode: int
    changed: int
    text: str
    source: str


@dataclass(frozen=True)
class Source:
    """What is copied, and where it goes.

    Attributes:
        root: directory on the hosts below which all entries' paths lie.
        entries: directories before their contents.
        skipped: paths of what cannot be copied: sockets, pipes, devices.
    """

    root: str
    entries: tuple[Entry, ...]
    skipped: tuple[str, ...] = ()

    @property
    def files(self) -> list[Entry]:
        """The files; agents number them in this order."""
        return [entry for entry in self.entries if entry.kind == "file"]

    @property
    def size(self) -> int:
        """Of all files, in bytes."""
        return sum(entry.size for entry in self.entries)


def collect(source: str, destination: str, checksum: bool = False) -> Source:
    """List all that is copied.

    A directory's contents go to `destination` itself, a file becomes `destination`; with a slash at its end,
    both go into it by their own names.

    Args:
        source: a file or a directory on this machine.
        destination: a path on the hosts; relative to the current directory's path.
        checksum: whether files are compared by content.

    Raises:
        LaunchError: it is neither a file nor a directory.
        OSError: something cannot be read.
    """
    if destination.endswith("/"):
        destination += os.path.basename(os.path.abspath(source))
    target = destination if destination.startswith("~") else os.path.abspath(destination)
    found = os.stat(source)
    if stat.S_ISDIR(found.st_mode):
        skipped: list[str] = []
        return Source(target, tuple(_walk(source, checksum, skipped)), tuple(skipped))
    if not stat.S_ISREG(found.st_mode):
        raise LaunchError(f"{source} is neither a file nor a directory")
    root, name = os.path.split(target)
    return Source(root or "/", (_file(name, source, found, checksum),))


def _walk(top: str, checksum: bool, skipped: list[str], below: str = "") -> Iterator[Entry]:
    found = os.stat(top)
    yield Entry(below, "directory", 0, stat.S_IMODE(found.st_mode) & 0o777, found.st_mtime_ns, "", top)
    for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_symlink():
            yield Entry(path, "link", 0, 0, 0, os.readlink(entry.path), entry.path)
        elif entry.is_dir():
            yield from _walk(entry.path, checksum, skipped, path)
        elif entry.is_file():
            yield _file(path, entry.path, entry.stat(), checksum)
        else:
            skipped.append(entry.path)


def _file(path: str, source: str, found: os.stat_result, checksum: bool) -> Entry:
    with open(source, "rb") as file:  # a file that cannot be read is found before the copy starts
        digest = hashlib.file_digest(file, "sha256").hexdigest() if checksum else ""
    mode = stat.S_IMODE(found.st_mode) & 0o777
    return Entry(path, "file", found.st_size, mode, found.st_mtime_ns, digest, source)
