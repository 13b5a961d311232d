"""Checkpoint files that are complete or absent, even if a writer is killed or writers share a directory.

Note [Manifests]: a checkpoint exists from the moment its manifest is renamed to ``.<file>.json``. Until then,
its files have temporary names that contain a unique token, which is also recorded in the manifest. Afterwards
the files are renamed to their final names. Readers prefer a file's temporary name if it still exists, so a
checkpoint is complete even if its writer was killed between the renames, and a table always matches its
model. Files that were copied without their manifests also count as checkpoints, but are considered
older than any checkpoint with a manifest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from ringdance.data.files import file_crc32
from ringdance.errors import RingdanceError
from ringdance.host.files import open_at_once, sync_path

_log = logging.getLogger("ringdance")
_MOST_BYTES = 1 << 16  # Maximum size of a manifest in bytes.
TABLE = ".npy"
"""Suffix appended to a checkpoint file's name to form the name of its table file."""
tokens: set[str] = set()
"""Tokens of the saves in progress in this process. See Note [Manifests]."""
_naming = threading.Lock()  # Serializes this process's writers that use the same directory and name.
_locks: dict[Path, IO[bytes]] = {}  # Lock files, which stay locked until this process exits.


class CheckpointError(RingdanceError):
    """A checkpoint could not be written or read. Raised on all ranks."""


class SavedCheckpoint(NamedTuple):
    """A checkpoint found in the directory.

    Attributes:
        number: Number of the checkpoint.
        serial: Position in the order of saving, starting at 1, or 0 if the manifest is missing.
        token: Token in the temporary file names, or "" if the manifest is missing. See Note [Manifests].
        sizes: Sizes of the checkpoint file and the table file in bytes. A single entry if there is no table.
        checksums: CRC-32 of each of these files, or empty if the manifest is missing.
        problem: Why the checkpoint is not usable, or "" if it is complete.
    """

    number: int
    serial: int = 0
    token: str = ""
    sizes: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    problem: str = ""

    @property
    def table(self) -> bool:
        """True if the checkpoint has a table."""
        return len(self.sizes) > 1


class CheckpointFiles:
    """The checkpoint files in a directory, used on rank 0. Only one thread writes. See Note [Manifests]."""

    def __init__(self, directory: Path, keep: int, name: str, suffix: str) -> None:
        self._directory, self._keep, self._name, self._suffix = directory, keep, name, suffix
        stem = rf"{re.escape(name)}-(\d{{8}}|[1-9]\d{{8,}}){re.escape(suffix)}"
        self._names = re.compile(rf"{stem}|\.{stem}\.json")
        files = rf"(?:{stem}(?:\{TABLE})?|\.{stem}\.json)"
        self._partials = re.compile(rf"\.{files}\.partial-(?P<token>[0-9a-f]+)")
        self._whole: set[SavedCheckpoint] = set()  # Checkpoints with verified checksums.
        self._lock, self._claimed = directory / f".{name}-N{suffix}.lock", False

    def path(self, number: int) -> Path:
        """Return the path of a checkpoint."""
        return self._directory / f"{self._name}-{number:08d}{self._suffix}"

    def scan(self) -> list[SavedCheckpoint]:
        """Return all checkpoints: damaged ones, ones without a manifest, then others in order of saving."""
        present = [saved for number in self._numbers() if (saved := self.look(number))]
        return sorted(present, key=lambda saved: (not saved.problem, saved.serial, saved.number))

    def _numbers(self) -> set[int]:
        """Return the checkpoint numbers that occur in the names of files and manifests."""
        matches = [self._names.fullmatch(name) for name in os.listdir(self._directory)]
        return {int(match[1] or match[2]) for match in matches if match}

    def look(self, number: int) -> SavedCheckpoint | None:
        """Return the checkpoint with this number, or None if its main file does not exist."""
        path = self.path(number)
        files = [path, table_path(path)]
        sizes_now = [size for file in files if (size := _size(file)) is not None]
        saved = SavedCheckpoint(number, sizes=tuple(sizes_now))
        manifest = b""
        try:
            if _manifest(path).exists() and not 0 < (_size(_manifest(path)) or 0) < _MOST_BYTES:
                raise ValueError
            manifest = _manifest(path).read_bytes()
            about = json.loads(manifest)
            sizes, sums = (tuple(map(int, about[name])) for name in ("sizes", "checksums"))
            saved = SavedCheckpoint(number, int(about["serial"]), about["token"], sizes, sums)
            if not (sizes and len(sums) == len(sizes) and re.fullmatch("[0-9a-f]+", saved.token)):
                raise ValueError
        except FileNotFoundError:
            pass
        except (ArithmeticError, AttributeError, ValueError, LookupError, TypeError, OSError, RecursionError):
            saved = SavedCheckpoint(number, problem=f"{_manifest(path)} is damaged")
        # Check the table first, because a process that removes a checkpoint starts with the main file.
        for file, size in reversed(list(zip(files, saved.sizes, strict=False))):
            there = _size(present_path(file, saved.token))
            if there is None and file == path:
                return None
            if there != size:
                problem = "is missing" if there is None else f"has {there} bytes instead of {size}"
                saved = saved._replace(problem=f"{file} {problem}")
        with contextlib.suppress(OSError):
            if saved.problem and manifest and _manifest(path).read_bytes() != manifest:
                return self.look(number)  # Another process has just replaced the checkpoint.
        return saved if _size(present_path(path, saved.token)) is not None else None

    def find(self, number: int | None) -> SavedCheckpoint | None:
        """Return checkpoint ``number``. If ``number`` is None, return the last one saved, if there is one.

        Raises:
            CheckpointError: Checkpoint ``number`` does not exist or is damaged, or all are damaged.
        """
        every, result = self.scan(), None
        for place, saved in reversed(list(enumerate(every))):
            if not saved.problem and number in (None, saved.number):
                try:
                    every[place] = saved = self._checked(saved)
                except FileNotFoundError:
                    return self.find(number)
                if not saved.problem:
                    result = saved
                    break
        damaged = ", ".join(f"{saved.number} ({saved.problem})" for saved in every if saved.problem)
        if result or (number is None and not damaged):
            if damaged and result and number is None:
                _log.warning(
                    "ringdance: reading checkpoint %d. Skipping damaged checkpoints: %s.",
                    result.number, damaged,
                )
            return result
        others = ", ".join(str(saved.number) for saved in every if not saved.problem) or "none"
        raise CheckpointError(
            f"there is no complete checkpoint{'' if number is None else f' {number}'}. Complete: {others}. "
            f"Damaged: {damaged or 'none'}. Read another checkpoint, or remove the damaged files."
        )

    def _checked(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Verify a checkpoint's checksums. Returns the checkpoint, with a problem if a checksum differs.

        Raises:
            FileNotFoundError: Another process has just replaced the checkpoint.
        """
        path = self.path(saved.number)
        if saved in self._whole:
            return saved
        for file, checksum in zip((path, table_path(path)), saved.checksums, strict=False):
            try:
                actual = file_crc32(present_path(file, saved.token))
            except FileNotFoundError:
                raise
            except OSError as error:
                return saved._replace(problem=f"{file} cannot be read: {error.strerror}")
            if actual != checksum:
                if self.look(saved.number) != saved:
                    raise FileNotFoundError(errno.ENOENT, "another process has replaced this file", str(file))
                return saved._replace(problem=f"{file} is damaged: its checksum does not match")
        self._whole.add(saved)
        return saved

    def table(self, saved: SavedCheckpoint) -> Path:
        """Return the path of a checkpoint's table.

        Raises:
            CheckpointError: The checkpoint was saved without a table.
        """
        if not saved.table:
            raise CheckpointError(f"checkpoint {saved.number} has no table, because it was saved without one")
        return present_path(table_path(self.path(saved.number)), saved.token)

    def write(
        self, number: int, token: str, write: Callable[[Path], Any], write_table: Callable[[], None] | None
    ) -> None:
        """Write a checkpoint as described in Note [Manifests], then remove all but the last ``keep``."""
        path = self.path(number)
        files = [path, *([table_path(path)] if write_table is not None else [])]
        partials = [partial_path(file, token) for file in (*files, _manifest(path))]
        try:
            self._claim()
            if write_table is not None:
                write_table()
            write(partials[0])
            if partials[0].is_dir():
                shutil.rmtree(partials[0])
                raise CheckpointError("a checkpoint must be a file, but the function wrote a directory")
            for file in partials[:-1]:
                sync_path(file)
            sums = tuple(map(file_crc32, partials[:-1]))
            with _naming:
                serial = 1 + max((other.serial for other in self.scan()), default=0)
                sizes = tuple(file.stat().st_size for file in partials[:-1])
                saved = SavedCheckpoint(number, serial, token, sizes, sums)
                about = {"serial": serial, "token": token, "sizes": sizes, "checksums": sums}
                partials[-1].write_text(json.dumps(about))
                for file in (partials[-1], self._directory):
                    sync_path(file)
                os.replace(partials[-1], _manifest(path))
        except BaseException:
            for file in partials:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
            raise
        with _naming:
            sync_path(self._directory)
            self._finish(saved)
            for old in self._numbers() - {saved.number for saved in self.scan()[-self._keep :]}:
                self._remove(old)

    def _claim(self) -> None:
        """Finish or remove the checkpoints that killed writers left behind, before the first save."""
        with _naming:
            if self._claimed:
                return
            file = _locks.get(self._lock)
            if file is None or not os.fstat(file.fileno()).st_nlink:  # The lock file was removed.
                file = _locks[self._lock] = open(self._lock, "ab", opener=open_at_once)  # noqa: SIM115
            self._claimed = True
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # This process may already hold the lock.
            except (BlockingIOError, PermissionError):
                _log.warning(
                    "ringdance: another process, perhaps on another host, is writing the checkpoints %s in "
                    "%s. Use a different directory or name= for each job, because each job removes old "
                    "checkpoints.",
                    self.path(0).name.replace("0" * 8, "*"), self._directory,
                )  # fmt: skip
                return
            except OSError:  # The file system does not support locks. Assume that there is only one writer.
                pass
            for saved in self.scan():
                self._finish(saved)
            for path in self._directory.iterdir():
                match = self._partials.fullmatch(path.name)
                if match and match["token"] not in tokens:
                    with contextlib.suppress(OSError):  # The path may be a directory, for example.
                        path.unlink()

    def _finish(self, saved: SavedCheckpoint) -> None:
        """Rename a checkpoint's files to their final names."""
        path = self.path(saved.number)
        for file in (path, table_path(path)):
            with contextlib.suppress(FileNotFoundError):
                os.replace(partial_path(file, saved.token), file)
        if saved.serial and not saved.table:  # An existing table belongs to the replaced checkpoint.
            table_path(path).unlink(missing_ok=True)

    def _remove(self, number: int) -> None:
        """Remove a checkpoint, starting with the main file, without which the checkpoint does not exist."""
        path = self.path(number)
        for file in (path, table_path(path), _manifest(path)):
            file.unlink(missing_ok=True)


def table_path(path: Path) -> Path:
    """Return the path of a checkpoint's table file."""
    return path.with_name(f"{path.name}{TABLE}")


def _manifest(path: Path) -> Path:
    return path.with_name(f".{path.name}.json")


def partial_path(path: Path, token: str) -> Path:
    """Return a file's temporary path. See Note [Manifests]."""
    return path.with_name(f".{path.name}.partial-{token}")  # torch.save stores the stem, so it must not vary.


def _size(path: Path) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist or is not a regular file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def present_path(path: Path, token: str) -> Path:
    """Return the path under which a checkpoint's file can be read now. See Note [Manifests]."""
    return first if (first := partial_path(path, token)).exists() else path
