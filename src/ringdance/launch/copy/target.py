"""A file on its way to this host: begun anew or gone on with, checked, and renamed when it is whole.

Standard library only: it runs in an agent.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from typing import IO

DONE = -1
"""In place of the number of bytes that are there: the file is."""

_READ = 1 << 20
_CLOSE_NS = 1_000_000  # some file systems keep times less exactly than others


class ReceivedFile:
    """A file of the copy.

    What has come so far lies beside its place, under a name with this host's name (other hosts may share the
    folder), a digest of the source's size and time, and 64 random bits: where others may write too, they
    cannot put a file of theirs there first. Only its owner can read it before it is whole.

    Args:
        place: its path here.
        size: in bytes.
        mode: its permission bits.
        changed: its time of modification, ns since the epoch.
    """

    def __init__(self, place: str, size: int, mode: int, changed: int) -> None:
        self._place, self._size, self._mode, self._changed = place, size, mode, changed
        self.have = 0
        self.digest = ""
        self.failed = False
        name = os.path.basename(place)
        self._stem = f".{_shortened(name)}.ringdance-{os.uname().nodename[-20:]}-"
        self._key = hashlib.sha256(f"{name} {size} {changed}".encode()).hexdigest()[:12]
        self._draft = ""
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()

    def look(self, partials: set[str], digest: str = "") -> int:
        """How many bytes are there, or :data:`DONE`.

        Args:
            partials: names in its folder that earlier copies have left.
            digest: SHA-256 of the file, if contents count; else equal size and time are the same file.

        Raises:
            OSError: a folder is in its place.
        """
        try:
            found = os.stat(self._place)
        except FileNotFoundError:
            found = None
        if found and stat.S_ISDIR(found.st_mode):
            raise OSError(f"{self._place} is a folder here; to copy into it, end the destination with /")
        if found and self._same(found, digest):
            self.have = DONE
            return DONE
        for name in sorted(partials):
            path = os.path.join(os.path.dirname(self._place), name)
            if not name.startswith(self._stem) or not _is_own(path) or _locked(path):
                continue
            if name.startswith(f"{self._stem}{self._key}-") and not self._draft:
                self._draft = path
                self.have = min(os.lstat(path).st_size, self._size)
            else:  # of another state of the file, or of a second copy: of no use any more
                os.unlink(path)
        return self.have

    def _same(self, found: os.stat_result, digest: str) -> bool:
        if not stat.S_ISREG(found.st_mode) or found.st_size != self._size:
            return False
        if digest:
            with open(self._place, "rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        else:
            same = abs(found.st_mtime_ns - self._changed) < _CLOSE_NS
        if same and stat.S_IMODE(found.st_mode) != self._mode:
            os.chmod(self._place, self._mode)
        return same

    def write(self, at: int, data: bytes) -> int:
        """Take a chunk; how many of its bytes were new.

        Raises:
            OSError: it cannot be written.
        """
        if self.have == DONE or at + len(data) <= self.have:
            return 0
        if at > self.have:
            raise OSError(f"{self._place}: bytes {self.have} to {at} have not come")
        fresh = memoryview(data)[self.have - at :]
        file = self._open()
        file.write(fresh)
        self._hash.update(fresh)
        self.have += len(fresh)
        return len(fresh)

    def _open(self) -> IO[bytes]:
        """The draft, at its end, with all that it holds taken into the checksum."""
        if self._file:
            return self._file
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        if not self._draft:
            name = f"{self._stem}{self._key}-{os.urandom(8).hex()}"
            self._draft = os.path.join(os.path.dirname(self._place), name)
            flags |= os.O_CREAT | os.O_EXCL
        file = open(os.open(self._draft, flags, 0o600), "r+b", buffering=0)  # noqa: SIM115
        if not flags & os.O_CREAT and not _is_own(file.fileno()):
            file.close()
            raise OSError(f"{self._draft} was changed by somebody else; remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OSError(f"{self._place}: another copy is writing it just now") from None
        except OSError:
            pass  # this file system has no locks
        file.truncate(self.have)
        left = self.have
        while left:
            data = file.read(min(_READ, left))
            self._hash.update(data)
            left -= len(data)
        self._file = file
        return file

    def whole(self) -> bool:
        """Whether all of it has come."""
        return self.have == self._size

    def finish(self) -> bool:
        """Check it and give it its name, mode and time; False, and nothing left, if it is not what was sent.

        Raises:
            OSError: it cannot be renamed.
        """
        file = self._open()
        if self._hash.hexdigest() != self.digest:
            os.unlink(self._draft)
            self._draft = ""
            return False
        os.fchmod(file.fileno(), self._mode)
        os.utime(file.fileno(), ns=(self._changed, self._changed))
        os.replace(self._draft, self._place)
        self.have = DONE
        return True

    def give_up(self) -> None:
        """Close what is open; what has come stays."""
        if self._file:
            self._file.close()
            self._file = None


def partials_in(folder: str) -> set[str]:
    """Names of what earlier copies have left in a folder."""
    try:
        return {name for name in os.listdir(folder) if name.startswith(".") and ".ringdance-" in name}
    except FileNotFoundError:
        return set()


def _shortened(name: str) -> str:
    """A name that leaves room for more in the 255 bytes that file systems allow."""
    data = name.encode(errors="surrogateescape")
    return name if len(data) <= 160 else hashlib.sha256(data).hexdigest()[:40]


def _is_own(file: str | int) -> bool:
    """Whether nobody else can have written a file, given by its path or open, or can under another name."""
    try:
        found = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    except FileNotFoundError:
        return False
    private = stat.S_ISREG(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return private and found.st_uid == os.geteuid() and found.st_nlink == 1


def _locked(path: str) -> bool:
    """Whether another copy is writing it."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
