"""A loader of rows from named pipes, one for each rank of a host, for the ranks of a job."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringdance import session
from ringdance.core.request import Collective, ReduceOp
from ringdance.data.order import check_positive
from ringdance.data.pipes import Pipe, rows
from ringdance.data.tables import Rows, TableBatch
from ringdance.errors import ArgumentError
from ringdance.training import basics
from ringdance.training.collectives import Call
from ringdance.training.objects import allgather_json
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id
from ringdance.training.sharding import check_plan

__all__ = ["pipe_loader"]

DIRECTORY = "/opt/ml/input/data"


def pipe_loader(channel: str, batch_size: int, **options: Any) -> PipeLoader:
    """Return a loader of the rows that come from a channel in SageMaker's Pipe mode, as NumPy arrays.

    Each iteration reads the next pipe of the channel, ``CHANNEL_0``, ``CHANNEL_1`` and so on, to its end, and
    yields ``ringdance.data.TableBatch``. It is collective: all ranks iterate together. How many batches there
    are is known at the end only; a rank whose pipe ends before those of others gets batches of padding, with
    weight 0.

    Each rank of a host needs a pipe of its own: the channel is ``<channel>_<local rank>`` where the job has
    that, as ``ringdance.submit.sagemaker`` makes it.

    Args:
        channel: its name, without local rank and epoch.
        batch_size: rows for each rank in each batch.
        options: ``table_size`` (default 1,000,000), ``fields`` (39), ``prefetch`` (batches, 2),
            ``directory`` of the pipes, ``timeout`` (60 seconds in which a pipe must be there), and
            ``process_set``.
    """
    return PipeLoader(channel, batch_size, **options)


class PipeLoader:
    """What ``pipe_loader`` returns; the bindings set `convert`.

    Raises:
        ArgumentError: an argument is wrong; when iterating: a pipe is missing, two ranks read the same one,
            or a row is broken; raised on all ranks.
        MismatchError: the ranks gave different arguments; raised on all.
    """

    def __init__(
        self, channel: str, batch_size: int, *, table_size: int = 1_000_000, fields: int = 39,
        prefetch: int = 2, directory: str | os.PathLike[str] = DIRECTORY, timeout: float = 60.0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_positive(batch_size=batch_size, table_size=table_size, fields=fields, prefetch=prefetch)
        same = {"channel": channel, "batch_size": batch_size, "table_size": table_size, "fields": fields}
        self._rank, self._size = check_plan("pad", same, process_set)
        self.channel, self.batch_size, self.table_size, self.fields = channel, batch_size, table_size, fields
        self._prefetch, self._directory, self._timeout = prefetch, Path(directory), timeout
        self._set = process_set
        self.number, self._found = 0, ""
        self.convert: Callable[[TableBatch], Any] = lambda batch: batch

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Accept an epoch, as other loaders do: pipes are read in their order, each from its beginning.

        Raises:
            ArgumentError: `position` is not 0.
        """
        if position:
            raise ArgumentError(
                f"position={position}: a pipe cannot be read from its middle. Write checkpoints at the ends "
                "of epochs, or use the channel in FastFile mode with table_loader"
            )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next pipe."""
        reader = _Reader(self._open(), self)
        self.number += 1
        position, exhausted = 0, False
        try:
            while True:
                some = None if exhausted else reader.next()
                exhausted = some is None
                failed = isinstance(some, Exception)
                mine = 0 if some is None or isinstance(some, Exception) else len(some.labels)
                count, failures = self._sum(mine, failed)
                if failures:
                    self._raise(some if isinstance(some, Exception) else None)
                if not count:
                    return
                if some is None or isinstance(some, Exception):
                    some = Rows.empty(1, self.fields)
                    for array in some:
                        array[:] = 0
                position += count
                yield self.convert(TableBatch(*some, mine * self._size / count, position, count))
        finally:
            reader.close()

    def _open(self) -> Pipe:
        """Open this rank's pipe, and compare it with those of the others: a collective call."""
        error, pipe = "", None
        try:
            pipe = Pipe(self._directory / f"{self._name()}_{self.number}", self._timeout)
            if pipe.locked_by:
                error = f"{pipe.path} is read by {pipe.locked_by} already"
        except (ArgumentError, OSError) as failure:
            error = str(failure)
        about = {"rank": basics.rank(), "pid": os.getpid(), "host": os.uname().nodename, "error": error}
        about["identity"] = pipe.identity if pipe else None
        everyone = allgather_json(about, f"pipe_loader.{self.channel}.open", self._set)
        readers: dict[str, list[Any]] = {}
        for one in everyone:
            if one["identity"]:
                readers.setdefault(json.dumps([one["host"], one["identity"]]), []).append(one)
        problem = ""
        for some in readers.values():
            if len(some) > 1:
                who = " and ".join(f"rank {one['rank']} (process {one['pid']})" for one in some)
                problem = (
                    f"{who} of host {some[0]['host']} read the same pipe of channel {self.channel!r}: each "
                    f"would get a random part. Give each rank of a host a channel of its own, "
                    f"{self.channel}_0, {self.channel}_1 and so on; ringdance.submit.sagemaker makes them "
                    "for InputMode Pipe and processes_per_host"
                )
        wrong = [
            f"rank {one['rank']} of host {one['host']}: {one['error']}" for one in everyone if one["error"]
        ]
        if problem or wrong:
            if pipe:
                pipe.close()
            raise ArgumentError(problem or wrong[0])
        assert pipe is not None
        return pipe

    def _name(self) -> str:
        """Return this rank's channel: with its local rank, where there is such a one."""
        own = f"{self.channel}_{basics.local_rank()}"
        channels, end = json.loads(os.environ.get("SM_CHANNELS") or "[]"), time.monotonic() + self._timeout
        while not self._found and time.monotonic() < end:
            for name in (own, self.channel):
                if name in channels or (self._directory / f"{name}_{self.number}").exists():
                    self._found = self._found or name
            time.sleep(0 if self._found else 0.05)
        return self._found or own

    def _sum(self, mine: int, failed: bool) -> tuple[int, int]:
        """Return rows and failures of all ranks."""
        counts = np.array([mine, failed], np.int64)
        name, number = f"pipe_loader.{self.channel}", set_id(self._set)
        call = Call(Collective.ALLREDUCE, name, ReduceOp.SUM, set_id=number)
        call.submit(session.engine(), (counts,), (counts,)).wait()
        return int(counts[0]), int(counts[1])

    def _raise(self, error: Exception | None) -> None:
        """Raise the first error of any rank on all: a collective call."""
        if error is not None and not isinstance(error, ArgumentError | OSError):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        text = f"rank {basics.rank()} of host {os.uname().nodename}: {error}" if error else ""
        found = allgather_json(text, f"pipe_loader.{self.channel}.error", self._set)
        raise ArgumentError(next(one for one in found if one)) from error


class _Reader:
    """A thread that reads a pipe ahead, in batches."""

    def __init__(self, pipe: Pipe, loader: PipeLoader) -> None:
        self._pipe, self._loader = pipe, loader
        self._closed = threading.Event()
        self._batches: queue.Queue[Rows | Exception | None] = queue.Queue(loader._prefetch)
        self._thread = threading.Thread(target=self._read, name="ringdance-pipe", daemon=True)
        self._thread.start()

    def next(self) -> Rows | Exception | None:
        """Return the next batch, None at the end, or what went wrong."""
        return self._batches.get()

    def close(self) -> None:
        """End the thread, and close the pipe."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._batches.empty():
                self._batches.get()
            self._thread.join(0.05)
        self._pipe.close()

    def _read(self) -> None:
        size, left = self._loader.batch_size, Rows.empty(0, self._loader.fields)
        try:
            pieces = self._pipe.pieces(self._closed.is_set)
            for some in rows(self._pipe.path, pieces, self._loader.fields, self._loader.table_size):
                left = Rows(*(np.concatenate(pair) for pair in zip(left, some, strict=True)))
                while len(left.labels) >= size:
                    self._put(left.part(0, size))
                    left = left.part(size, len(left.labels))
            if len(left.labels):
                self._put(left)
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Rows | Exception | None) -> None:
        while not self._closed.is_set():
            try:
                return self._batches.put(item, timeout=0.5)
            except queue.Full:
                pass
