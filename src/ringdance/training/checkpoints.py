"""Checkpoints that rank 0 writes in the background, and that all ranks can read."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from ringdance.data.files import why_not
from ringdance.errors import ArgumentError
from ringdance.training import session
from ringdance.training.checkpoint_files import (
    TABLE,
    CheckpointError,
    CheckpointFiles,
    SavedCheckpoint,
    partial_path,
    present_path,
    table_path,
    tokens,
)
from ringdance.training.embedding import EmbeddingTable
from ringdance.training.objects import broadcast_object

__all__ = ["CheckpointError", "Checkpoints"]

_log = logging.getLogger("ringdance")
_READS = 5  # Number of attempts to read a checkpoint that other processes keep replacing.


class Checkpoints:
    """Numbered checkpoints in a directory. Only the most recent ones are kept.

    All ranks must call each method. Only rank 0 uses the directory, so no other host needs access to it. A
    checkpoint exists once it is completely on disk, so a killed run loses at most the checkpoint that it was
    writing. Several ``Checkpoints`` can share a directory if their names or suffixes differ.

    Args:
        directory: Directory of the checkpoints. Created if needed.
        keep: Number of checkpoints to keep.
        name: Files are named ``<name>-<number><suffix>``. Table files have ``.npy`` appended.
        suffix: Suffix such as ".pt". It must not end with ".npy".

    Raises:
        ArgumentError: ``keep`` is less than 1, or ``name`` or ``suffix`` cannot be used in file names.
        CheckpointError: Rank 0 cannot create the directory. Raised on all ranks, like the methods' errors.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, name: str = "checkpoint", suffix: str = ""
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ArgumentError(f"keep={keep!r} must be a positive integer.")
        if "/" in name + suffix or suffix.endswith(TABLE):
            raise ArgumentError(
                f"name={name!r} and suffix={suffix!r} must not contain '/', and suffix must not end with "
                f"{TABLE}."
            )
        self.directory = Path(directory)
        self._files = CheckpointFiles(self.directory, keep, name, suffix)
        self._is_writer, self._host = session.engine().rank == 0, session.engine().hosts[0]
        self._executor = ThreadPoolExecutor(1, "ringdance-checkpoint") if self._is_writer else None
        self._writing: Future[None] | None = None
        self._closed = False
        self._on_rank_zero(lambda: self.directory.mkdir(parents=True, exist_ok=True))

    def save(self, number: int, write: Callable[[Path], Any], table: EmbeddingTable | None = None) -> None:
        """Wait until the previous checkpoint is complete, then write a checkpoint in the background.

        Args:
            number: Non-negative number, such as the step. Replaces an existing checkpoint with this number.
            write: Called on rank 0 in a thread, with the path of the file to write. The data that it saves
                must not change before it returns, so save copies.
            table: Table to save in a separate file, with its current values.

        Raises:
            CheckpointError: The previous checkpoint, or the sharded table of this one, could not be written.
                Sharded tables are written before this call returns.
        """
        if (number := operator.index(number)) < 0:
            raise ArgumentError(f"Checkpoints.save({number}): number must not be negative.")
        if self._closed:
            raise ArgumentError(f"Checkpoints.save({number}) was called after close(). Create a new object.")
        self.wait()
        token = uuid.uuid4().hex
        path = partial_path(table_path(self._files.path(number)), token)
        try:
            write_table = None if table is None else table.snapshot(path)
        except OSError as error:
            with contextlib.suppress(OSError):  # The file exists only on rank 0.
                path.unlink()
            raise self._error(self._not_written(number, error)) from None
        if self._executor is not None:
            tokens.add(token)
            self._writing = self._executor.submit(self._write, number, token, write, write_table)

    def _write(self, number: int, token: str, *writers: Any) -> None:
        try:
            self._files.write(number, token, *writers)
        except Exception as error:  # Log it, as the script may exit without waiting for the checkpoint.
            problem = self._not_written(number, error)
            _log.error("ringdance: %s", self._error(problem))
            raise problem from None
        finally:
            tokens.discard(token)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""

        def result() -> None:
            if (writing := self._writing) is not None:
                wait([writing])  # If Ctrl-C interrupts this, the next call waits again.
                self._writing = None
                writing.result()

        self._on_rank_zero(result)

    def numbers(self) -> list[int]:
        """Return the numbers of all complete checkpoints, in the order in which they were saved."""
        return self._on_rank_zero(lambda: [saved.number for saved in self._files.scan() if not saved.problem])

    def read(
        self, number: int | None = None, table: EmbeddingTable | None = None
    ) -> tuple[int, bytes] | None:
        """Return a checkpoint's number and content on all ranks.

        Args:
            number: Number of the checkpoint. None means the last one saved. In that case, damaged checkpoints
                are skipped with a warning, and the result is None if none exist.
            table: Table to fill with the values that were saved with the checkpoint.

        Raises:
            CheckpointError: The checkpoint does not exist, is damaged or has no table, or all checkpoints are
                damaged.
            ArgumentError: The saved table has a different shape. Raised on all ranks.
        """

        def find() -> tuple[SavedCheckpoint, bytes, Path | None] | None:
            for _ in range(_READS):
                if (saved := self._files.find(number)) is None:
                    return None
                with contextlib.suppress(FileNotFoundError):  # Another process has just replaced the file.
                    content = present_path(self._files.path(saved.number), saved.token).read_bytes()
                    return saved, content, None if table is None else self._files.table(saved)
            raise CheckpointError("cannot read a checkpoint, because other processes keep replacing it")

        self.wait()
        for _ in range(_READS):
            with session.pause_stall_check("reading a checkpoint"):
                result: tuple[SavedCheckpoint, bytes, Path | None] | None = self._on_rank_zero(find)
            if result is None:
                return None
            saved, content, path = result
            problem: OSError | None = None
            try:
                if table is not None and path is not None:
                    table.load(path)
            except OSError as error:  # Raised on all ranks.
                problem = error
            if self._on_rank_zero(partial(self._files.look, saved.number)) == saved:
                if problem:
                    raise self._error(problem) from None
                return saved.number, content
        raise self._error("cannot read a checkpoint, because other processes keep replacing it")

    def close(self) -> None:
        """Wait until the last checkpoint is written, and stop the writer thread."""
        self._closed = True
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def _on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Return the action's result on all ranks, or raise its error on all ranks."""
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

    def _not_written(self, number: int, error: Exception) -> CheckpointError:
        name = self._files.path(number).name
        return CheckpointError(f"{name} could not be written: {why_not(error, self.directory)}")

    def _error(self, problem: Exception | str) -> CheckpointError:
        if isinstance(problem, OSError):
            problem = f"{problem.strerror or problem}: {problem.filename or self.directory}"
        elif not isinstance(problem, (str, CheckpointError)):
            problem = f"{type(problem).__name__}: {problem}"
        return CheckpointError(f"rank 0 on {self._host}, checkpoints in {self.directory}: {problem}")
