"""Checkpoints: written by rank 0 in the background, found again by all ranks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ringdance import session
from ringdance.errors import ArgumentError, RingdanceError
from ringdance.training.embedding import EmbeddingTable
from ringdance.training.objects import broadcast_object

__all__ = ["CheckpointError", "Checkpoints"]

_TABLE = ".npy"  # ending of the file with a checkpoint's table


class CheckpointError(RingdanceError):
    """A checkpoint could not be written or read; raised on all ranks."""


class Checkpoints:
    """Numbered checkpoints in a directory, of which the last ones are kept.

    All ranks make the calls; rank 0 alone touches the directory, so no other host needs to see it. A file is
    written under another name, synchronized with the disk, then renamed: one with its final name is whole,
    and a killed run loses at most the one that it was writing.

    Args:
        directory: is made if needed.
        keep: number of checkpoints that stay.
        name: the files are ``<name>-<number>``, and end with ``suffix``.
        suffix: such as ".pt"; not ".npy", which is that of tables.

    Raises:
        ArgumentError: ``keep`` is less than 1.
        CheckpointError: rank 0 cannot make the directory; raised on all ranks, here and by the methods.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, name: str = "checkpoint", suffix: str = ""
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep={keep}: give 1 or more.")
        self.directory, self._keep = Path(directory), keep
        self._name, self._suffix = name, suffix
        self._is_writer = session.engine().rank == 0
        self._executor = ThreadPoolExecutor(1, "ringdance-checkpoint") if self._is_writer else None
        self._writing: Future[None] | None = None
        self._on_rank_zero(self._prepare)

    def save(
        self, number: int, write: Callable[[Path], Any], table: EmbeddingTable | None = None
    ) -> None:
        """Write a checkpoint in the background; wait for the one before it if that is not complete yet.

        Args:
            number: such as the step; the latest has the highest.
            write: called on rank 0 in a thread with the path of a file to write. What it saves must not
                change meanwhile: give it copies.
            table: saved with it as it is now, in a file of its own beside it.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.wait()
        path = self._path(number).with_suffix(_TABLE)
        write_table = table.snapshot(path) if table is not None else None

        def write_all() -> None:
            if write_table is not None:  # first: a checkpoint with its final name has its table
                write_table()
            self._write(number, write)

        if self._executor is not None:
            self._writing = self._executor.submit(write_all)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        writing, self._writing = self._writing, None
        self._on_rank_zero(lambda: writing.result() if writing else None)

    def numbers(self) -> list[int]:
        """Return the numbers of the complete checkpoints, in order."""
        found: list[int] = self._on_rank_zero(self._numbers)
        return found

    def read(
        self, number: int | None = None, table: EmbeddingTable | None = None
    ) -> tuple[int, bytes] | None:
        """Return a checkpoint's number and content on all ranks.

        Args:
            number: which; None: the latest, and the result is None if there is none.
            table: filled with the values that were saved with it.
        """

        def find() -> tuple[int, bytes] | None:
            numbers = self._numbers()
            if number is None and not numbers:
                return None
            wanted = numbers[-1] if number is None else number
            return wanted, self._path(wanted).read_bytes()

        self.wait()
        found: tuple[int, bytes] | None = self._on_rank_zero(find)
        if found is not None and table is not None:
            table.load(self._path(found[0]).with_suffix(_TABLE))
        return found

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def _on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Return the action's result on all ranks, or raise its error on all."""
        result, problem = None, ""
        if self._is_writer:
            try:
                result = action()
            except OSError as error:
                problem = f"{error.strerror or error}: {error.filename or self.directory}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        result, problem = broadcast_object((result, problem), name="checkpoints")
        if problem:
            raise CheckpointError(
                f"rank 0 on {session.engine().hosts[0]}, checkpoints in {self.directory}: {problem}"
            )
        return result

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob(f".{self._name}-*.partial"):  # by a run that was killed
            left.unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        pattern = re.compile(rf"{re.escape(self._name)}-(\d+){re.escape(self._suffix)}")
        matches = (pattern.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, number: int) -> Path:
        return self.directory / f"{self._name}-{number:08d}{self._suffix}"

    def _write(self, number: int, write: Callable[[Path], Any]) -> None:
        path = self._path(number)
        partial = path.with_name(f".{path.name}.partial")
        try:
            write(partial)
            _synchronize(partial)
            os.replace(partial, path)
            _synchronize(self.directory)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        for old in self._numbers()[: -self._keep]:
            self._path(old).unlink(missing_ok=True)
        kept = {self._path(one).with_suffix(_TABLE) for one in self._numbers()}
        for table in set(self.directory.glob(f"{self._name}-*{_TABLE}")) - kept:  # a killed run's too
            table.unlink(missing_ok=True)


def _synchronize(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
