"""Checkpoints: written by rank 0 in the background, found again by all ranks.

Note [Manifests]: a checkpoint counts from the moment in which its manifest, ``.<file>.json``, gets its name.
Until then its files have names that no other save uses, with a token that is in the manifest; afterwards
they get their own. A reader takes a file by its first name if there is one, so a checkpoint is complete even
if its writer was killed between the two, and a table is always that of its model. Files that were copied
without their manifests count too, as older than those that have one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import operator
import os
import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from ringdance import session
from ringdance.data.files import sync_path
from ringdance.errors import ArgumentError, RingdanceError
from ringdance.training.embedding import EmbeddingTable
from ringdance.training.objects import broadcast_object

__all__ = ["CheckpointError", "Checkpoints"]

_log = logging.getLogger("ringdance")
_READS = 5  # attempts to read what another process replaces meanwhile
_TABLE = ".npy"  # appended to a checkpoint's name: its table
_tokens: set[str] = set()  # of the saves under way in this process, see Note [Manifests]
_naming = threading.Lock()  # two of this process's writers may have the same directory and name
_locks: dict[Path, tuple[IO[bytes], int]] = {}  # of directory and name, and for how many writers


class CheckpointError(RingdanceError):
    """A checkpoint could not be written or read; raised on all ranks."""


class Checkpoints:
    """Numbered checkpoints in a directory, of which those saved last are kept.

    All ranks make the calls; rank 0 alone touches the directory, so no other host needs to see it. A
    checkpoint counts when all of it is on the disk: a killed run loses at most the one that it was writing.
    Others can be in the same directory, if their name or suffix differs.

    Args:
        directory: is made if needed.
        keep: number of checkpoints that stay.
        name: the files are ``<name>-<number><suffix>``, and tables the same with ``.npy`` at the end.
        suffix: such as ".pt"; it cannot end with ".npy".

    Raises:
        ArgumentError: ``keep`` is less than 1, or files cannot have such names.
        CheckpointError: rank 0 cannot make the directory; raised on all ranks, here and by the methods.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, name: str = "checkpoint", suffix: str = ""
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep={keep}: give 1 or more.")
        if "/" in name + suffix or suffix.endswith(_TABLE):
            raise ArgumentError(f"name={name!r}, suffix={suffix!r}: no '/', and not {_TABLE} at the end.")
        self.directory = Path(directory)
        self._files = _Files(self.directory, keep, name, suffix)
        self._is_writer = session.engine().rank == 0
        self._executor = ThreadPoolExecutor(1, "ringdance-checkpoint") if self._is_writer else None
        self._writing: Future[None] | None = None
        self._closed = False
        self._on_rank_zero(lambda: self.directory.mkdir(parents=True, exist_ok=True))

    def save(
        self, number: int, write: Callable[[Path], Any], table: EmbeddingTable | None = None
    ) -> None:
        """Write a checkpoint in the background; wait for the one before it if that is not complete yet.

        Args:
            number: such as the step; 0 or more. One that there is already is replaced.
            write: called on rank 0 in a thread with the path of a file to write. What it saves must not
                change meanwhile: give it copies.
            table: saved with it as it is now, in a file of its own beside it.

        Raises:
            CheckpointError: the one before could not be written, or a sharded table, which is written now.
        """
        if (number := operator.index(number)) < 0:
            raise ArgumentError(f"Checkpoints.save({number}): give a number of 0 or more.")
        if self._closed:
            raise ArgumentError(f"Checkpoints.save({number}) after close(): make a new Checkpoints.")
        self.wait()
        token = uuid.uuid4().hex
        path = _partial(_table(self._files.path(number)), token)
        try:
            write_table = None if table is None else table.snapshot(path)
        except OSError as error:
            with contextlib.suppress(OSError):  # only rank 0 has it
                path.unlink()
            raise self._error(error) from None
        if self._executor is not None:
            _tokens.add(token)
            self._writing = self._executor.submit(self._write, number, token, write, write_table)

    def _write(self, number: int, token: str, *writers: Any) -> None:
        try:
            self._files.write(number, token, *writers)
        except Exception as error:  # the script may end before it waits for the last one
            _log.error("ringdance: checkpoint %d is not written: %s", number, self._error(error))
            raise
        finally:
            _tokens.discard(token)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""

        def result() -> None:
            if (writing := self._writing) is not None:
                wait([writing])  # after Ctrl-C here, the next call waits for it again
                self._writing = None
                writing.result()

        self._on_rank_zero(result)

    def numbers(self) -> list[int]:
        """Return the numbers of the complete checkpoints in the order in which they were saved."""
        found: list[int] = self._on_rank_zero(
            lambda: [one.number for one in self._files.scan() if not one.problem]
        )
        return found

    def read(
        self, number: int | None = None, table: EmbeddingTable | None = None
    ) -> tuple[int, bytes] | None:
        """Return a checkpoint's number and content on all ranks.

        Args:
            number: which; None: the one that was saved last, and the result is None if there is none. One
                that is damaged is left out, with a warning.
            table: filled with the values that were saved with it.

        Raises:
            CheckpointError: there is no such checkpoint, or none with a table, or all are damaged.
            ArgumentError: its table has another shape; on all ranks.
        """

        def find() -> tuple[_Saved, bytes, Path | None] | None:
            for _ in range(_READS):
                if (saved := self._files.find(number)) is None:
                    return None
                with contextlib.suppress(FileNotFoundError):  # another process has just replaced it
                    content = _present(self._files.path(saved.number), saved.token).read_bytes()
                    return saved, content, None if table is None else self._files.table(saved)
            raise CheckpointError("checkpoints are replaced again and again while they are read")

        self.wait()
        for _ in range(_READS):
            found: tuple[_Saved, bytes, Path | None] | None = self._on_rank_zero(find)
            if found is None:
                return None
            saved, content, path = found
            problem: OSError | None = None
            try:
                if table is not None and path is not None:
                    table.load(path)
            except OSError as error:  # on all ranks
                problem = error
            if self._on_rank_zero(partial(self._files.look, saved.number)) == saved:
                if problem:
                    raise self._error(problem) from None
                return saved.number, content
        raise self._error("checkpoints are replaced again and again while they are read")

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread."""
        self._closed = True
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._files.close()

    def _on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Return the action's result on all ranks, or raise its error on all."""
        result, problem = None, None
        if self._is_writer:
            try:
                result = action()
            except Exception as error:
                problem = self._error(error)
        result, problem = broadcast_object((result, problem), name="checkpoints")
        if problem:
            raise problem
        return result

    def _error(self, problem: Exception | str) -> CheckpointError:
        if isinstance(problem, OSError):
            problem = f"{problem.strerror or problem}: {problem.filename or self.directory}"
        elif not isinstance(problem, (str, CheckpointError)):
            problem = f"{type(problem).__name__}: {problem}"
        host = session.engine().hosts[0]
        return CheckpointError(f"rank 0 on {host}, checkpoints in {self.directory}: {problem}")


class _Saved(NamedTuple):
    """A checkpoint that is in the directory.

    Attributes:
        number: of the checkpoint.
        serial: counts what was saved there, from 1; 0 without a manifest.
        token: in the first names of its files, see Note [Manifests]; "" without one.
        sizes: bytes of its file and of its table; the latter is missing where it has none.
        problem: why it is no whole checkpoint, or "".
    """

    number: int
    serial: int = 0
    token: str = ""
    sizes: tuple[int, ...] = ()
    problem: str = ""

    @property
    def table(self) -> bool:
        """Whether it has one."""
        return len(self.sizes) > 1


class _Files:
    """The files of checkpoints, on rank 0; one thread writes. See Note [Manifests]."""

    def __init__(self, directory: Path, keep: int, name: str, suffix: str) -> None:
        self._directory, self._keep, self._name, self._suffix = directory, keep, name, suffix
        stem = rf"{re.escape(name)}-(\d{{8}}|[1-9]\d{{8,}}){re.escape(suffix)}"
        self._names = re.compile(rf"{stem}|\.{stem}\.json")
        files = rf"(?:{stem}(?:\{_TABLE})?|\.{stem}\.json)"
        self._partials = re.compile(rf"\.{files}\.partial-(?P<token>[0-9a-f]+)")
        self._lock, self._claimed = directory / f".{name}-N{suffix}.lock", False

    def path(self, number: int) -> Path:
        """Return the path of a checkpoint."""
        return self._directory / f"{self._name}-{number:08d}{self._suffix}"

    def scan(self) -> list[_Saved]:
        """Return the checkpoints: damaged ones, those without a manifest, then in the order of saving."""
        found = [one for number in self._numbers() if (one := self.look(number))]
        return sorted(found, key=lambda one: (not one.problem, one.serial, one.number))

    def _numbers(self) -> set[int]:
        """Return the numbers in the names of files and manifests."""
        found = [self._names.fullmatch(name) for name in os.listdir(self._directory)]
        return {int(one[1] or one[2]) for one in found if one}

    def look(self, number: int) -> _Saved | None:
        """Return what there is of a number; None: its own file is not there."""
        path = self.path(number)
        files = [path, _table(path)]
        saved = _Saved(number, sizes=tuple(size for one in files if (size := _size(one)) is not None))
        try:
            about = json.loads(_manifest(path).read_bytes())
            saved = _Saved(number, int(about["serial"]), about["token"], tuple(map(int, about["sizes"])))
            if not re.fullmatch("[0-9a-f]+", saved.token):
                raise ValueError
        except FileNotFoundError:
            pass
        except (ArithmeticError, ValueError, LookupError, TypeError):
            saved = _Saved(number, problem=f"{_manifest(path)} is damaged")
        # The table first: another process that removes a checkpoint begins with the checkpoint's own file.
        for one, size in reversed(list(zip(files, saved.sizes, strict=False))):
            found = _size(_present(one, saved.token))
            if found is None and one == path:
                return None
            if found != size:
                problem = "is missing" if found is None else f"has {found} bytes, not {size}"
                saved = saved._replace(problem=f"{one} {problem}")
        return saved if _size(_present(path, saved.token)) is not None else None

    def find(self, number: int | None) -> _Saved | None:
        """Return a checkpoint, or the one that was saved last; None: there are no checkpoints.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        every = self.scan()
        whole = [one for one in every if not one.problem]
        damaged = ", ".join(f"{one.number} ({one.problem})" for one in every if one.problem)
        found = [one for one in whole if number in (None, one.number)]
        if found or (number is None and not damaged):
            if damaged and number is None:
                _log.warning("ringdance: %d is read; damaged checkpoints: %s.", found[-1].number, damaged)
            return found[-1] if found else None
        others = ", ".join(str(one.number) for one in whole) or "none"
        raise CheckpointError(
            f"no checkpoint{'' if number is None else f' {number}'} that is whole. Whole: {others}; "
            f"damaged: {damaged or 'none'}. Read another one, or remove the files of the damaged ones"
        )

    def table(self, saved: _Saved) -> Path:
        """Return where the table of a checkpoint is.

        Raises:
            CheckpointError: it was saved without one.
        """
        if not saved.table:
            raise CheckpointError(f"checkpoint {saved.number} has no table: it was saved without one")
        return _present(_table(self.path(saved.number)), saved.token)

    def write(
        self, number: int, token: str, write: Callable[[Path], Any], write_table: Callable[[], None] | None
    ) -> None:
        """Write a checkpoint, see Note [Manifests], and remove those that are too many."""
        path = self.path(number)
        files = [path, *([_table(path)] if write_table is not None else [])]
        partials = [_partial(one, token) for one in (*files, _manifest(path))]
        try:
            self._claim()
            if write_table is not None:
                write_table()
            write(partials[0])
            for one in partials[:-1]:
                sync_path(one)
            with _naming:
                serial = 1 + max((one.serial for one in self.scan()), default=0)
                saved = _Saved(number, serial, token, tuple(one.stat().st_size for one in partials[:-1]))
                about = {"serial": serial, "token": token, "sizes": saved.sizes}
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

    def close(self) -> None:
        """Let other processes write, unless this one has another writer of these checkpoints."""
        with _naming:
            if self._claimed:
                file, writers = _locks.pop(self._lock)
                if writers > 1:  # closing any descriptor of it would unlock the file
                    _locks[self._lock] = file, writers - 1
                else:
                    file.close()
            self._claimed = False

    def _claim(self) -> None:
        """Before the first save: complete what killed writers have left, remove what cannot be completed."""
        with _naming:
            if self._claimed:
                return
            self._claimed = True
            file, writers = _locks.get(self._lock) or (open(self._lock, "ab"), 0)  # noqa: SIM115
            _locks[self._lock] = file, writers + 1
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
                if found and found["token"] not in _tokens:
                    with contextlib.suppress(OSError):  # a directory, say, that is not ours
                        path.unlink()

    def _finish(self, saved: _Saved) -> None:
        """Give the files of a checkpoint their names."""
        path = self.path(saved.number)
        for one in (path, _table(path)):
            with contextlib.suppress(FileNotFoundError):
                os.replace(_partial(one, saved.token), one)
        if saved.serial and not saved.table:  # that of the checkpoint which was replaced
            _table(path).unlink(missing_ok=True)

    def _remove(self, number: int) -> None:
        """Remove a checkpoint; first its own file, without which it is none."""
        path = self.path(number)
        for one in (path, _table(path), _manifest(path)):
            one.unlink(missing_ok=True)


def _table(path: Path) -> Path:
    return path.with_name(f"{path.name}{_TABLE}")


def _manifest(path: Path) -> Path:
    return path.with_name(f".{path.name}.json")


def _partial(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.partial-{token}")  # torch.save writes the stem into the file


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _present(path: Path, token: str) -> Path:
    """Return where a file of a checkpoint is; see Note [Manifests]."""
    return first if (first := _partial(path, token)).exists() else path

