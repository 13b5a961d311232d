"""A loader of rows from named pipes, one for each rank of a host, for the ranks of a job."""

from __future__ import annotations

import json
import os
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
from ringdance.training.loaders.ahead import AsyncDataLoaderMixin
from ringdance.training.objects import allgather_json
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id
from ringdance.training.sharding import check_plan

DIRECTORY = "/opt/ml/input/data"


class PipeLoader:
    """What ``pipe_loader`` returns; it sets `convert`.

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
        self.number = 0
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
        pipe = self._open()
        self.number += 1
        reader, position = _Reader(pipe, self), 0
        batches = iter(reader)
        name, number = f"pipe_loader.{self.channel}", set_id(self._set)
        call = Call(Collective.ALLREDUCE, name, ReduceOp.SUM, set_id=number)
        try:
            while True:
                error: Exception | None = None
                some: Rows | None = None
                try:
                    some = next(batches, None)
                except Exception as failure:
                    error = failure
                mine = 0 if some is None else len(some.labels)
                counts = np.array([mine, error is not None], np.int64)
                call.submit(session.engine(), (counts,), (counts,)).wait()
                count, failed = counts.tolist()
                if failed:
                    self._exchange("error", None, error)
                if not count:
                    return
                if some is None:
                    some = Rows(*(np.zeros_like(array) for array in Rows.empty(1, self.fields)))
                position += count
                yield self.convert(TableBatch(*some, mine * self._size / count, position, count))
        finally:
            reader.close_async_loader()
            pipe.close()

    def _exchange(self, what: str, value: Any, error: Exception | None) -> list[Any]:
        """Return the values of all ranks; raise the first error of any on all."""
        text = ""
        if error:
            known = isinstance(error, ArgumentError | OSError)
            text = f"rank {basics.rank()} of host {os.uname().nodename}: "
            text += str(error) if known else f"{type(error).__name__}: {error}"
        found = allgather_json((value, text), f"pipe_loader.{self.channel}.{what}", self._set)
        if texts := [text for _, text in found if text]:
            raise ArgumentError(texts[0]) from error
        return [value for value, _ in found]

    def _open(self) -> Pipe:
        """Open this rank's pipe, and compare it with those of the others: a collective call."""
        names = [f"{self.channel}_{basics.local_rank()}", self.channel]
        channels = json.loads(os.environ.get("SM_CHANNELS") or "[]")
        names = [name for name in names if name in channels][:1] or names
        error, pipe, host = None, None, os.uname().nodename
        about: dict[str, Any] = {"rank": basics.rank(), "pid": os.getpid(), "host": host}
        try:
            pipe = Pipe([self._directory / f"{name}_{self.number}" for name in names], self._timeout)
            about["pipe"] = [host, *pipe.identity]
        except (ArgumentError, OSError) as failure:
            error = failure
        try:
            readers = self._exchange("open", about, error)
            for one in readers:
                same = [other for other in readers if other["pipe"] == one["pipe"]]
                if len(same) > 1:
                    who = " and ".join(f"rank {one['rank']} (process {one['pid']})" for one in same)
                    raise ArgumentError(
                        f"{who} of host {one['host']} read the same pipe of channel {self.channel!r}: each "
                        f"would get a random part. Give each rank of a host a channel of its own, "
                        f"{self.channel}_0, {self.channel}_1 and so on; ringdance.submit.sagemaker makes "
                        "them for InputMode Pipe and processes_per_host"
                    )
            if pipe and pipe.locked:
                error = ArgumentError(f"{pipe.path} is read by another process already (`fuser -v` names it)")
            self._exchange("locked", None, error)
        except BaseException:
            if pipe:
                pipe.close()
            raise
        assert pipe is not None
        return pipe


class _Reader(AsyncDataLoaderMixin):
    """Reads a pipe ahead by a thread, in batches."""

    def __init__(self, pipe: Pipe, loader: PipeLoader) -> None:
        super().__init__(loader._prefetch)
        self._pipe, self._loader = pipe, loader

    def _process_batch(self, batch: Rows) -> Rows:
        return batch

    def _iterate(self) -> Iterator[Rows]:
        size, fields = self._loader.batch_size, self._loader.fields
        left, pieces = Rows.empty(0, fields), self._pipe.pieces(self._closing.is_set)
        for some in rows(self._pipe.path, pieces, fields, self._loader.table_size):
            left = Rows.joined([left, some], fields)
            while len(left.labels) >= size:
                yield left.part(0, size)
                left = left.part(size, len(left.labels))
        if len(left.labels):
            yield left
