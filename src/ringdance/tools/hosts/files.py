"""List the entries to copy: a single file, or everything in a directory."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringdance.errors import LaunchError


class Entry(NamedTuple):
    """A file, directory or symbolic link to copy. All fields except ``source`` are sent to the agents.

    Attributes:
        path: Path relative to the destination, "" for the destination itself.
        kind: "file", "directory" or "link".
        size: Size of a file in bytes.
        mode: Permission bits.
        changed: Modification time in nanoseconds since the epoch.
        text: Target of a link, or SHA-256 checksum of a file if files are compared by content.
        source: Path of the entry on this machine.
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
    """The entries of a copy and their destination.

    Attributes:
        root: Destination on the hosts. The paths of the entries are relative to it.
        entries: All entries. A directory precedes its contents.
        skipped: Paths of sockets, pipes and devices, which are not copied.
    """

    root: str
    entries: tuple[Entry, ...]
    skipped: tuple[str, ...] = ()

    @property
    def files(self) -> list[Entry]:
        """Entries that are files. Agents number the files in this order."""
        return [entry for entry in self.entries if entry.kind == "file"]

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(entry.size for entry in self.entries)


def collect(source: str, destination: str, checksum: bool = False) -> Source:
    """List the entries to copy.

    A directory's contents are copied into ``destination``, and a file is copied to that path. If
    ``destination`` ends with a slash, the file or directory is created in it under its own name.

    Args:
        source: File or directory on this machine.
        destination: Path on the hosts. A relative path is relative to this process's working directory.
        checksum: If True, compute SHA-256 checksums, so that files are compared by content.

    Raises:
        LaunchError: ``source`` is neither a file nor a directory.
        OSError: A file or directory cannot be read.
    """
    if destination.endswith("/"):
        destination += os.path.basename(os.path.abspath(source))
    target = destination if destination.startswith("~") else os.path.abspath(destination)
    status = os.stat(source)
    if stat.S_ISDIR(status.st_mode):
        skipped: list[str] = []
        return Source(target, tuple(_walk(source, checksum, skipped)), tuple(skipped))
    if not stat.S_ISREG(status.st_mode):
        raise LaunchError(f"{source} is neither a file nor a directory")
    root, name = os.path.split(target)
    return Source(root or "/", (_file(name, source, status, checksum),))


def _walk(top: str, checksum: bool, skipped: list[str], below: str = "") -> Iterator[Entry]:
    status = os.stat(top)
    yield Entry(below, "directory", 0, stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime_ns, "", top)
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
    with open(source, "rb") as file:  # raises OSError before the copy starts if the file is unreadable
        digest = hashlib.file_digest(file, "sha256").hexdigest() if checksum else ""
    mode = stat.S_IMODE(found.st_mode) & 0o777
    return Entry(path, "file", found.st_size, mode, found.st_mtime_ns, digest, source)
