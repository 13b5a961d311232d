"""What is to be copied: a file, or all that a folder holds."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringdance.errors import LaunchError


@dataclass(frozen=True)
class Entry:
    """Something below the destination.

    Attributes:
        path: from there; "" for the destination itself.
        kind: "file", "folder" or "link".
        size: of a file, in bytes.
        mode: permission bits.
        changed: when it was modified, ns since the epoch.
        text: what a link says; of a file its SHA-256, where contents are compared.
        source: its path here.
    """

    path: str
    kind: str
    size: int
    mode: int
    changed: int
    text: str
    source: str

    def told(self) -> list[object]:
        """What the hosts are told of it."""
        return [self.path, self.kind, self.size, self.mode, self.changed, self.text]


@dataclass(frozen=True)
class Source:
    """What is to be copied, and to where.

    Attributes:
        root: the folder on the hosts below which all entries' paths lie.
        entries: folders before what they hold.
        skipped: paths of what cannot be copied: sockets, pipes, devices.
    """

    root: str
    entries: tuple[Entry, ...]
    skipped: tuple[str, ...] = ()

    @property
    def files(self) -> list[Entry]:
        """The files; their numbers count from here."""
        return [entry for entry in self.entries if entry.kind == "file"]

    @property
    def size(self) -> int:
        """Of all files, in bytes."""
        return sum(entry.size for entry in self.entries)

    def with_digests(self) -> Source:
        """The same with each file's SHA-256.

        Raises:
            LaunchError: a file cannot be read.
        """
        try:
            found = [
                replace(entry, text=_digest(entry.source)) if entry.kind == "file" else entry
                for entry in self.entries
            ]
        except OSError as error:
            raise LaunchError(f"{error.filename}: {error.strerror}") from None
        return replace(self, entries=tuple(found))


def look(source: str, destination: str) -> Source:
    """All that is to be copied.

    A folder's contents go to `destination` itself, a file becomes `destination`; with a slash at its end,
    both go into it by their own names.

    Args:
        source: a file or a folder here.
        destination: a path on the hosts; from the current folder if it is relative.

    Raises:
        LaunchError: something cannot be read.
    """
    try:
        found = os.stat(source)
        where = _destination(source, destination)
        if stat.S_ISDIR(found.st_mode):
            skipped: list[str] = []
            return Source(where, tuple(_walk(source, skipped)), tuple(skipped))
        if not stat.S_ISREG(found.st_mode):
            raise LaunchError(f"{source} is neither a file nor a folder")
        root, name = os.path.split(where)
        return Source(root or "/", (_file(name, source, found),))
    except OSError as error:
        raise LaunchError(f"{error.filename or source}: {error.strerror}") from None


def _destination(source: str, destination: str) -> str:
    if destination.endswith("/"):
        destination += os.path.basename(os.path.abspath(source))
    return destination if destination.startswith("~") else os.path.abspath(destination)


def _walk(top: str, skipped: list[str], below: str = "") -> Iterator[Entry]:
    found = os.stat(top)
    yield Entry(below, "folder", 0, stat.S_IMODE(found.st_mode) & 0o777, found.st_mtime_ns, "", top)
    for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.is_symlink():
            yield Entry(path, "link", 0, 0, 0, os.readlink(entry.path), entry.path)
        elif entry.is_dir():
            yield from _walk(entry.path, skipped, path)
        elif entry.is_file():
            yield _file(path, entry.path, entry.stat())
        else:
            skipped.append(entry.path)


def _file(path: str, source: str, found: os.stat_result) -> Entry:
    if not os.access(source, os.R_OK):
        raise LaunchError(f"{source}: it cannot be read")
    return Entry(
        path, "file", found.st_size, stat.S_IMODE(found.st_mode) & 0o777, found.st_mtime_ns, "", source
    )


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
