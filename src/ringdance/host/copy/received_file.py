"""Write a file that is being copied to this host: start or continue it, then check and rename it.

Standard library only: it runs in an agent.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from typing import IO

from ..directories import host_name
from ..system import linux

DONE = -1
"""Used instead of the number of bytes on this host if the file is complete."""

_READ = 1 << 20
_CLOSE_NS = 1_000_000  # tolerance for modification times, which some file systems round


class ReceivedFile:
    """A file that is being copied to this host.

    Until the file is complete, it is a draft next to its final path. The draft's name contains this host's
    name (other hosts may share the directory), a digest of the source's size and time, and 64 random bits, so
    that other users who may write to the directory cannot guess it. Only its owner can read the draft.

    Args:
        path: Final path of the file on this host.
        size: Size in bytes.
        mode: Permission bits.
        changed: Modification time in nanoseconds since the epoch.

    Attributes:
        have: Number of bytes on this host, or ``DONE``.
        digest: SHA-256 of the source, or "" until it is known.
        failed: True once the copy of this file is abandoned.
    """

    def __init__(self, path: str, size: int, mode: int, changed: int) -> None:
        self._path, self._size, self._mode, self._changed = path, size, mode, changed
        self.have = 0
        self.digest = ""
        self.failed = False
        name = os.path.basename(path)
        self._stem = f".{_shortened(name)}.ringdance-{host_name()}-"
        self._key = hashlib.sha256(f"{name} {size} {changed}".encode()).hexdigest()[:12]
        self._draft = ""
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()

    def check(self, partials: set[str], digest: str = "") -> int:
        """Return how many bytes of the file are on this host, or ``DONE``. Removes outdated drafts.

        Args:
            partials: Names of partial files that earlier copies left behind in its directory.
            digest: SHA-256 for comparing contents. If empty, an equal size and modification time suffice.

        Raises:
            OSError: The path is a directory.
        """
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            status = None
        if status and stat.S_ISDIR(status.st_mode):
            raise OSError(
                f"{self._path} is a directory on this host. To copy into it, add / to the destination."
            )
        if status and self._same(status, digest):
            self.have = DONE
            return DONE
        for name in sorted(partials):
            path = os.path.join(os.path.dirname(self._path), name)
            if not name.startswith(self._stem) or not _is_own(path) or _locked(path):
                continue
            if name.startswith(f"{self._stem}{self._key}-") and not self._draft:
                self._draft = path
                self.have = min(os.lstat(path).st_size, self._size)
            else:  # a draft of another version of the file, or a second draft of this one
                os.unlink(path)
        return self.have

    def _same(self, found: os.stat_result, digest: str) -> bool:
        if not stat.S_ISREG(found.st_mode) or found.st_size != self._size:
            return False
        if digest:
            with open(self._path, "rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        else:
            same = abs(found.st_mtime_ns - self._changed) < _CLOSE_NS
        if same and stat.S_IMODE(found.st_mode) != self._mode:
            os.chmod(self._path, self._mode)
        return same

    def write(self, at: int, data: bytes) -> int:
        """Write a chunk. Return the number of new bytes in it.

        Raises:
            OSError: The file cannot be written.
        """
        if self.have == DONE or at + len(data) <= self.have:
            return 0
        if at > self.have:
            raise OSError(f"{self._path}: expected the chunk at byte {self.have}, got the chunk at byte {at}")
        fresh = memoryview(data)[self.have - at :]
        file = self._open()
        file.write(fresh)
        self._hash.update(fresh)
        self.have += len(fresh)
        return len(fresh)

    def _open(self) -> IO[bytes]:
        """Open the draft, positioned at its end, and add its contents to the checksum."""
        if self._file:
            return self._file
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        if not self._draft:
            name = f"{self._stem}{self._key}-{os.urandom(8).hex()}"
            self._draft = os.path.join(os.path.dirname(self._path), name)
            flags |= os.O_CREAT | os.O_EXCL
        file = open(os.open(self._draft, flags, 0o600), "r+b", buffering=0)  # noqa: SIM115
        if not flags & os.O_CREAT and not _is_own(file.fileno()):
            file.close()
            raise OSError(
                f"the partial file {self._draft} can be changed by other users. Remove it, then copy again."
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OSError(
                f"{self._path}: another `ringdance hosts copy` is writing this file. Wait until it ends."
            ) from None
        except OSError:
            pass  # this file system does not support locks
        file.truncate(self.have)
        while data := file.read(_READ):
            self._hash.update(data)
        self._file = file
        return file

    @property
    def ready(self) -> bool:
        """True if all bytes and their checksum have arrived."""
        return self.have == self._size and self.digest != "" and not self.failed

    def finish(self) -> bool:
        """Set the draft's mode and time, and rename it. If it is corrupt, delete it and return False.

        Raises:
            OSError: The file cannot be renamed.
        """
        file = self._open()
        if self._hash.hexdigest() != self.digest:
            os.unlink(self._draft)
            self._draft = ""
            return False
        os.fchmod(file.fileno(), self._mode)
        os.utime(file.fileno(), ns=(self._changed, self._changed))
        os.replace(self._draft, self._path)
        self.have = DONE
        return True

    def close(self) -> None:
        """Close the draft. It stays on disk for the next copy."""
        if self._file:
            self._file.close()
            self._file = None


def partials_in(directory: str) -> set[str]:
    """Return the names of partial files that earlier copies left behind in a directory."""
    try:
        return {name for name in os.listdir(directory) if name.startswith(".") and ".ringdance-" in name}
    except FileNotFoundError:
        return set()


def _shortened(name: str) -> str:
    """Replace a long name with its hash, so that the draft's name does not exceed 255 bytes."""
    data = name.encode(errors="surrogateescape")
    return name if len(data) <= 160 else hashlib.sha256(data).hexdigest()[:40]


def _is_own(file: str | int) -> bool:
    """Return True if only this user can write to a file (path or descriptor), even through hard links."""
    try:
        status = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    except FileNotFoundError:
        return False
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return private and status.st_uid == os.geteuid() and status.st_nlink == 1


def _locked(path: str) -> bool:
    """Return True if another copy is writing the file."""
    try:
        return linux.locked(path)
    except OSError:
        return False
