"""The files of checkpoints: whole or not there, also after a kill, with several writers in one directory.

Note [Manifests]: a checkpoint counts from the moment in which its manifest, ``.<file>.json``, gets its name.
Until then its files have names that no other save uses, with a token that is in the manifest; afterwards
they get their own. A reader takes a file by its first name if there is one, so a checkpoint is complete even
if its writer was killed between the two, and a table is always that of its model. Files that were copied
without their manifests count too, as older than those that have one.
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
_MOST_BYTES = 1 << 16  # of a manifest
TABLE = ".npy"
"""Appended to a checkpoint's name: its table."""
tokens: set[str] = set()
"""Of the saves under way in this process, see Note [Manifests]."""
_naming = threading.Lock()  # two of this process's writers may have the same directory and name
_locks: dict[Path, IO[bytes]] = {}  # until this process ends


class CheckpointError(RingdanceError):
    """A checkpoint could not be written or read; raised on all ranks."""


class SavedCheckpoint(NamedTuple):
    """A checkpoint that is in the directory.

    Attributes:
        number: of the checkpoint.
        serial: counts what was saved there, from 1; 0 without a manifest.
        token: in the first names of its files, see Note [Manifests]; "" without one.
        sizes: bytes of its file and of its table; the latter is missing where it has none.
        checksums: CRC-32 of these; () without a manifest.
        problem: why it is no whole checkpoint, or "".
    """

    number: int
    serial: int = 0
    token: str = ""
    sizes: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    problem: str = ""

    @property
    def table(self) -> bool:
        """Whether it has one."""
        return len(self.sizes) > 1


class CheckpointFiles:
    """The files of checkpoints, on rank 0; one thread writes. See Note [Manifests]."""

    def __init__(self, directory: Path, keep: int, name: str, suffix: str) -> None:
        self._directory, self._keep, self._name, self._suffix = directory, keep, name, suffix
        stem = rf"{re.escape(name)}-(\d{{8}}|[1-9]\d{{8,}}){re.escape(suffix)}"
        self._names = re.compile(rf"{stem}|\.{stem}\.json")
        files = rf"(?:{stem}(?:\{TABLE})?|\.{stem}\.json)"
        self._partials = re.compile(rf"\.{files}\.partial-(?P<token>[0-9a-f]+)")
        self._whole: set[SavedCheckpoint] = set()  # what was read to its end
        self._lock, self._claimed = directory / f".{name}-N{suffix}.lock", False

    def path(self, number: int) -> Path:
        """Return the path of a checkpoint."""
        return self._directory / f"{self._name}-{number:08d}{self._suffix}"

    def scan(self) -> list[SavedCheckpoint]:
        """Return the checkpoints: damaged ones, those without a manifest, then in the order of saving."""
        found = [one for number in self._numbers() if (one := self.look(number))]
        return sorted(found, key=lambda one: (not one.problem, one.serial, one.number))

    def _numbers(self) -> set[int]:
        """Return the numbers in the names of files and manifests."""
        found = [self._names.fullmatch(name) for name in os.listdir(self._directory)]
        return {int(one[1] or one[2]) for one in found if one}

    def look(self, number: int) -> SavedCheckpoint | None:
        """Return what there is of a number; None: its own file is not there."""
        path = self.path(number)
        files = [path, table_path(path)]
        found = [size for one in files if (size := _size(one)) is not None]
        saved = SavedCheckpoint(number, sizes=tuple(found))
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
        # The table first: another process that removes a checkpoint begins with the checkpoint's own file.
        for one, size in reversed(list(zip(files, saved.sizes, strict=False))):
            there = _size(present_path(one, saved.token))
            if there is None and one == path:
                return None
            if there != size:
                problem = "is missing" if there is None else f"has {there} bytes, not {size}"
                saved = saved._replace(problem=f"{one} {problem}")
        with contextlib.suppress(OSError):
            if saved.problem and manifest and _manifest(path).read_bytes() != manifest:
                return self.look(number)  # another process has just replaced it
        return saved if _size(present_path(path, saved.token)) is not None else None

    def find(self, number: int | None) -> SavedCheckpoint | None:
        """Return a checkpoint, or the one that was saved last; None: there are no checkpoints.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        every, found = self.scan(), None
        for place, one in reversed(list(enumerate(every))):
            if not one.problem and number in (None, one.number):
                try:
                    every[place] = one = self._checked(one)
                except FileNotFoundError:
                    return self.find(number)
                if not one.problem:
                    found = one
                    break
        whole = [one for one in every if not one.problem]
        damaged = ", ".join(f"{one.number} ({one.problem})" for one in every if one.problem)
        if found or (number is None and not damaged):
            if damaged and found and number is None:
                _log.warning("ringdance: %d is read; damaged checkpoints: %s.", found.number, damaged)
            return found
        others = ", ".join(str(one.number) for one in whole) or "none"
        raise CheckpointError(
            f"no checkpoint{'' if number is None else f' {number}'} that is whole. Whole: {others}; "
            f"damaged: {damaged or 'none'}. Read another one, or remove the files of the damaged ones"
        )

    def _checked(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Read all of a checkpoint; return it, with a problem where a checksum is another one.

        Raises:
            FileNotFoundError: another process has just replaced it.
        """
        path = self.path(saved.number)
        if saved in self._whole:
            return saved
        for one, checksum in zip((path, table_path(path)), saved.checksums, strict=False):
            try:
                found = file_crc32(present_path(one, saved.token))
            except FileNotFoundError:
                raise
            except OSError as error:
                return saved._replace(problem=f"{one} cannot be read: {error.strerror}")
            if found != checksum:
                if self.look(saved.number) != saved:
                    raise FileNotFoundError(errno.ENOENT, "another process has replaced it", str(one))
                return saved._replace(problem=f"{one} is damaged: its checksum is another one")
        self._whole.add(saved)
        return saved

    def table(self, saved: SavedCheckpoint) -> Path:
        """Return where the table of a checkpoint is.

        Raises:
            CheckpointError: it was saved without one.
        """
        if not saved.table:
            raise CheckpointError(f"checkpoint {saved.number} has no table: it was saved without one")
        return present_path(table_path(self.path(saved.number)), saved.token)

    def write(
        self, number: int, token: str, write: Callable[[Path], Any], write_table: Callable[[], None] | None
    ) -> None:
        """Write a checkpoint, see Note [Manifests], and remove those that are too many."""
        path = self.path(number)
        files = [path, *([table_path(path)] if write_table is not None else [])]
        partials = [partial_path(one, token) for one in (*files, _manifest(path))]
        try:
            self._claim()
            if write_table is not None:
                write_table()
            write(partials[0])
            if partials[0].is_dir():
                shutil.rmtree(partials[0])
                raise CheckpointError("a checkpoint is one file, and what was passed wrote a directory")
            for one in partials[:-1]:
                sync_path(one)
            sums = tuple(map(file_crc32, partials[:-1]))
            with _naming:
                serial = 1 + max((one.serial for one in self.scan()), default=0)
                sizes = tuple(one.stat().st_size for one in partials[:-1])
                saved = SavedCheckpoint(number, serial, token, sizes, sums)
                about = {"serial": serial, "token": token, "sizes": sizes, "checksums": sums}
                partials[-1].write_text(json.dumps(about))
                for one in (partials[-1], self._directory):
                    sync_path(one)
                os.replace(partials[-1], _manifest(path))
        except BaseException:
            for one in partials:
                with contextlib.suppress(OSError):
                    one.unlink(missing_ok=True)
            raise
        with _naming:
            sync_path(self._directory)
            self._finish(saved)
            for old in self._numbers() - {one.number for one in self.scan()[-self._keep :]}:
                self._remove(old)

    def _claim(self) -> None:
        """Before the first save: complete what killed writers have left, remove what cannot be completed."""
        with _naming:
            if self._claimed:
                return
            file = _locks.get(self._lock)
            if file is None or not os.fstat(file.fileno()).st_nlink:  # it was removed
                file = _locks[self._lock] = open(self._lock, "ab", opener=open_at_once)  # noqa: SIM115
            self._claimed = True
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process may have it already
            except (BlockingIOError, PermissionError):
                _log.warning(
                    "ringdance: another process, also of another host, writes the checkpoints %s in %s. Each "
                    "job needs a directory or a name of its own: they remove each other's older checkpoints.",
                    self.path(0).name.replace("0" * 8, "*"), self._directory,
                )  # fmt: skip
                return
            except OSError:  # a file system without locks: it is assumed to be the only writer
                pass
            for one in self.scan():
                self._finish(one)
            for path in self._directory.iterdir():
                found = self._partials.fullmatch(path.name)
                if found and found["token"] not in tokens:
                    with contextlib.suppress(OSError):  # a directory, say, that is not ours
                        path.unlink()

    def _finish(self, saved: SavedCheckpoint) -> None:
        """Give the files of a checkpoint their names."""
        path = self.path(saved.number)
        for one in (path, table_path(path)):
            with contextlib.suppress(FileNotFoundError):
                os.replace(partial_path(one, saved.token), one)
        if saved.serial and not saved.table:  # that of the checkpoint which was replaced
            table_path(path).unlink(missing_ok=True)

    def _remove(self, number: int) -> None:
        """Remove a checkpoint; first its own file, without which it is none."""
        path = self.path(number)
        for one in (path, table_path(path), _manifest(path)):
            one.unlink(missing_ok=True)


def table_path(path: Path) -> Path:
    """Return the path of a checkpoint's table."""
    return path.with_name(f"{path.name}{TABLE}")


def _manifest(path: Path) -> Path:
    return path.with_name(f".{path.name}.json")


def partial_path(path: Path, token: str) -> Path:
    """Return the first name of a file; see Note [Manifests]."""
    return path.with_name(f".{path.name}.partial-{token}")  # torch.save writes the stem into the file


def _size(path: Path) -> int | None:
    """Return the bytes of a file; None: it is not there, or cannot be one."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def present_path(path: Path, token: str) -> Path:
    """Return where a file of a checkpoint is; see Note [Manifests]."""
    return first if (first := partial_path(path, token)).exists() else path
