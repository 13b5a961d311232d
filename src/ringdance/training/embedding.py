"""A table of embeddings in the host's memory, of which each step reads and updates some rows.

The framework sees only the rows that a step uses: it computes their gradient as that of any dense tensor, and
neither memory nor time of a step depends on the size of the table. Rows are either on all ranks
(replicated), or each on one of them (sharded): row r on rank r % size.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.core.request import Collective
from ringdance.errors import ArgumentError
from ringdance.training import session
from ringdance.training.collectives import Call
from ringdance.training.gradients.sparse import Rows, SparseExchange, merge
from ringdance.training.objects import broadcast_object

__all__ = ["EmbeddingTable"]

Array = np.ndarray[Any, Any]
_CHUNK = 1 << 16  # rows that are drawn, sent, read or written at once
_STEP = 2048  # rows that are updated at once, in the processor's cache
_TINY = np.finfo(np.float32).tiny

_tables: weakref.WeakSet[EmbeddingTable] = weakref.WeakSet()


def forget_lookups() -> None:
    """Let all tables forget the lookups of a step that has failed: no ``update`` will follow them."""
    for table in list(_tables):
        table._lookups.clear()


class EmbeddingTable:
    """Rows of float32 that are looked up by their numbers, and updated by Adagrad.

    All ranks make the same calls. In each step::

        rows, places = table.lookup(ids)     # rows[places] are the embeddings, of shape (*ids.shape, columns)
        ...                                  # the gradient of this rank's loss with respect to rows
        table.update(gradient)

    Args:
        rows: of the whole table.
        columns: of each row.
        rate: the learning rate, which may be changed at any time.
        scale: standard deviation of the first values, drawn from a normal distribution.
        accumulator: first sum of squared gradients, 0 or more; greater: smaller first steps. The default is
            that of Keras and TensorFlow. Gradients of a mean over a batch are small: where their squares stay
            far below this sum, steps are those of SGD at rate / sqrt(accumulator).
        sharded: whether each rank has only its part of the rows; ``lookup`` is a collective call then.
        seed: of the first values, which do not depend on the number of ranks.
        name: key that matches the ranks' calls, for people too.

    Attributes:
        rows, columns, rate, sharded, name: as above.
        values, accumulators: shape (rows of this rank, columns).

    Source: Duchi, Hazan, Singer: Adaptive subgradient methods, JMLR 2011.
    """

    def __init__(
        self, rows: int, columns: int, *, rate: float = 0.05, scale: float = 0.01, accumulator: float = 0.1,
        sharded: bool = False, seed: int = 0, name: str = "embedding",
    ) -> None:
        if rows < 1 or columns < 1:
            raise ArgumentError(f"EmbeddingTable({rows}, {columns}): give a positive number of each.")
        if not 0 <= accumulator < np.inf:
            raise ArgumentError(f"EmbeddingTable(accumulator={accumulator}): sums begin at 0 or more.")
        engine = session.engine()
        self.rows, self.columns, self.rate, self.name = rows, columns, rate, name
        self.sharded = sharded and engine.size > 1
        self._rank, self._size = (engine.rank, engine.size) if self.sharded else (0, 1)
        mine = len(range(self._rank, rows, self._size))
        self.values = np.empty((mine, columns), np.float32)
        self.accumulators = np.full((mine, columns), accumulator, np.float32)
        self._lookups: list[_Lookup] = []
        _tables.add(self)
        for begin, end in self._chunks():
            random = np.random.Generator(np.random.SFC64([seed, begin]))
            drawn = random.standard_normal((end - begin, columns), np.float32)
            drawn *= scale
            self._own(self.values, begin, end)[:] = drawn[self._first(begin) :: self._size]

    def lookup(self, ids: Any, training: bool = True) -> tuple[Array, Array]:
        """Return the rows that occur in `ids`, each once, and where each id's row is among them.

        Args:
            ids: integers of any shape: an array, or a tensor in the host's memory.
            training: whether an ``update`` with the gradient of these rows will follow.

        Returns:
            The rows, shape (n, columns), and places, int64, of the shape of `ids`.

        Raises:
            ArgumentError: an id is not the number of a row; raised on this rank, and peers get the same
                message.
        """
        ids = np.asarray(ids)
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if not 0 <= low <= high < self.rows or (ids.size and ids.dtype.kind not in "iu"):
            engine = session.engine()
            error = ArgumentError(
                f"{self.name}: ids {low} to {high} ({ids.dtype}) on rank {engine.rank} "
                f"({engine.hosts[engine.rank]}), but they are integers, and the table has {self.rows} rows."
            )
            first = SparseExchange.first_call(self.name)
            if self.sharded:
                first = Call(Collective.ALLTOALL, f"{self.name}.ids")
            first.refuse(engine, error)
            raise error
        keys, places = _unique(ids.reshape(-1).astype(np.int64, copy=False))
        found = _Lookup(keys)
        values = self._ask(found) if self.sharded else self.values.take(keys, axis=0)
        if training:
            self._lookups.append(found)
        return values, places.reshape(ids.shape)

    def update(self, *gradients: Any) -> None:
        """Update rows by the mean over the ranks of their gradients; a collective call.

        Args:
            gradients: those of the rows of each ``lookup`` since the last update, which are summed; those
                of more lookups than one are gradients of parts of a batch.

        Raises:
            ArgumentError: they do not fit the lookups.
        """
        lookups, self._lookups = self._lookups, []
        arrays = [np.asarray(one, np.float32) for one in gradients]
        if [one.shape for one in arrays] != [(len(one.keys), self.columns) for one in lookups]:
            raise ArgumentError(
                f"{self.name}: gradients of the rows of each lookup since the last update are needed, of "
                f"shapes {[(len(one.keys), self.columns) for one in lookups]}, not "
                f"{[one.shape for one in arrays]}. A lookup without an update needs training=False; those "
                "before are forgotten now."
            )
        engine = session.engine()
        if self.sharded:
            pairs = [self._send(*pair) for pair in zip(lookups, arrays, strict=True)]
        else:
            pairs = [(lookup.keys, gradient) for lookup, gradient in zip(lookups, arrays, strict=True)]
        keys, summed = pairs[0] if len(pairs) == 1 else (
            np.concatenate([np.zeros(0, np.int64), *(pair[0] for pair in pairs)]),
            np.concatenate([np.zeros((0, self.columns), np.float32), *(pair[1] for pair in pairs)]),
        )  # fmt: skip
        if self.sharded or engine.size == 1:
            keys, summed = merge(keys, summed, engine.size)
        else:
            parts = [Rows(keys, summed, self.rows)]
            exchange = SparseExchange(engine, parts, [self.name], name=self.name, average=True)
            (reduced,) = exchange.wait()
            keys, summed = reduced.keys, reduced.values
        for begin in range(0, len(keys), _STEP):
            self._adagrad(keys[begin : begin + _STEP], summed[begin : begin + _STEP])

    def _adagrad(self, keys: Array, gradient: Array) -> None:
        squares = self.accumulators.take(keys, axis=0)  # twice as fast as an index
        squares += gradient * gradient
        self.accumulators[keys] = squares
        np.maximum(squares, _TINY, out=squares)  # 0 / 0 where neither sum nor gradient is more than 0
        np.sqrt(squares, out=squares)
        np.divide(gradient, squares, out=squares)
        squares *= self.rate
        values = self.values.take(keys, axis=0)
        values -= squares
        self.values[keys] = values

    def _ask(self, lookup: _Lookup) -> Array:
        """Get rows from the ranks that have them."""
        owners = lookup.keys % self._size
        lookup.order = np.argsort(owners, kind="stable")
        lookup.sent = np.bincount(owners, minlength=self._size)
        asked, lookup.received = self._alltoall("ids", lookup.keys[lookup.order], lookup.sent)
        lookup.asked = asked // self._size
        answers, _ = self._alltoall("rows", self.values[lookup.asked], lookup.received)
        values = np.empty_like(answers)
        values[lookup.order] = answers
        return values

    def _send(self, lookup: _Lookup, gradient: Array) -> tuple[Array, Array]:
        """Send gradients to the ranks that have their rows; return this rank's rows, and their gradients."""
        gradients, _ = self._alltoall("gradients", gradient[lookup.order], lookup.sent)
        return lookup.asked, gradients

    def _alltoall(self, what: str, array: Array, splits: Array) -> tuple[Array, Array]:
        call = Call(Collective.ALLTOALL, f"{self.name}.{what}")
        work = call.submit(session.engine(), (np.ascontiguousarray(array),), splits=[splits])
        (received,) = work.wait()
        assert work.received_splits is not None
        return received, work.received_splits[0]

    # State ------------------------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Return a function that writes the table as it is now, for ``Checkpoints.save``; a collective call.

        A replicated table is copied, so that the function can write it in the background. A sharded one,
        of which no rank can hold all rows, is written at once by rank 0, and the function does nothing.

        Args:
            path: of the file, in which nothing else is written meanwhile; only rank 0 uses it.

        Raises:
            OSError: rank 0 could not write a sharded table; on all ranks.
        """
        if self.sharded:
            self.save(path)
        if self.sharded or session.engine().rank != 0:
            return lambda: None
        state = self.values.copy(), self.accumulators.copy()
        return lambda: _write(Path(path), self.rows, self.columns, iter([state]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole table, with its accumulators; a collective call, rank 0 writes.

        The file is a ``.npy`` of shape (2, rows, columns), float32: values, then accumulators.

        Raises:
            OSError: rank 0 could not write it; on all ranks.
        """
        problem: OSError | None = None
        parts = self._gathered()
        if session.engine().rank == 0:
            try:
                _write(Path(path), self.rows, self.columns, parts)
            except OSError as error:
                problem = error
        for _ in parts:  # all ranks take part to the end
            pass
        if problem := broadcast_object(problem, name=f"{self.name}.saved"):
            raise problem

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what ``save`` has written, with any number of ranks; a collective call, rank 0 reads.

        Lookups before it are forgotten, so ``update`` takes no gradients of them.

        Raises:
            ArgumentError: the file has a table of another shape, or is damaged; on all ranks.
            OSError: rank 0 could not read it; on all ranks.
        """
        self._lookups.clear()
        saved: Array = np.empty(0)
        problem: Exception | None = None
        if session.engine().rank == 0:
            try:
                saved = np.load(path, mmap_mode="r")
                if saved.shape != (2, self.rows, self.columns):
                    problem = ArgumentError(
                        f"{path} has a table of shape {saved.shape[1:]}, not {(self.rows, self.columns)}."
                    )
            except OSError as error:
                problem = error
            except (ValueError, EOFError) as error:  # EOFError: it is empty
                problem = ArgumentError(f"{path}: {error}")
        if problem := broadcast_object(problem, name=f"{self.name}.loaded"):
            raise problem
        for begin, end in self._chunks():
            part = np.empty((2, end - begin, self.columns), np.float32)
            if session.engine().rank == 0:
                part[:] = saved[:, begin:end]
            call = Call(Collective.BROADCAST, f"{self.name}.part", root=0)
            call.submit(session.engine(), (part,), (part,)).wait()
            for array, new in zip((self.values, self.accumulators), part, strict=True):
                self._own(array, begin, end)[:] = new[self._first(begin) :: self._size]

    def _gathered(self) -> Iterator[tuple[Array, Array]]:
        """Iterate over parts of all rows, values and accumulators, in order."""
        if not self.sharded:
            yield self.values, self.accumulators
            return
        for begin, end in self._chunks():
            arrays = self.values, self.accumulators
            own = np.concatenate([self._own(array, begin, end) for array in arrays], 1)
            call = Call(Collective.ALLGATHER, f"{self.name}.part")
            (joined,) = call.submit(session.engine(), (own,)).wait()
            whole = np.empty((end - begin, 2 * self.columns), np.float32)
            start = 0
            for rank in range(self._size):
                part = whole[(rank - begin) % self._size :: self._size]
                part[:] = joined[start : start + len(part)]
                start += len(part)
            yield whole[:, : self.columns], whole[:, self.columns :]

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.rows, _CHUNK):
            yield begin, min(begin + _CHUNK, self.rows)

    def _first(self, begin: int) -> int:
        """Return where this rank's first row is in a part that begins with that row of the table."""
        return (self._rank - begin) % self._size

    def _own(self, array: Array, begin: int, end: int) -> Array:
        """Return this rank's rows of a part of the table."""
        local = (begin + self._first(begin)) // self._size
        return array[local : local + len(range(begin + self._first(begin), end, self._size))]


class _Lookup:
    """The rows of a lookup, and for a sharded table how they were exchanged.

    Attributes:
        keys: ascending, each once.
        order: of the keys, by the ranks that have them.
        sent, received: how many were asked of, and by, each rank.
        asked: this rank's rows that were asked for, as indices of its part.
    """

    order: Array
    sent: Array
    received: Array
    asked: Array

    def __init__(self, keys: Array) -> None:
        self.keys = keys


def _unique(ids: Array) -> tuple[Array, Array]:
    """Return ascending ids, each once, and the place of each among them, as np.unique does.

    One sort of integers that hold id and place is faster than a sort of places by ids, and a look-up. Ids are
    those of a table in memory: with the bits of a place they fit into 63.
    """
    bits = len(ids).bit_length()
    pairs = ids << bits
    pairs |= np.arange(len(ids))
    pairs.sort()
    ascending = pairs >> bits
    first = np.ones(len(ids), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    pairs &= (1 << bits) - 1
    places = np.empty_like(pairs)
    places[pairs] = np.cumsum(first) - 1
    return ascending[first], places


def _write(path: Path, rows: int, columns: int, parts: Iterator[tuple[Array, Array]]) -> None:
    """Write a table's parts as one array."""
    # Not by memory-mapping: a full disk would be SIGBUS instead of an error.
    header = {"descr": "<f4", "fortran_order": False, "shape": (2, rows, columns)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        start, row, begin = file.tell(), 4 * columns, 0
        for part in parts:
            for number, array in enumerate(part):
                file.seek(start + (number * rows + begin) * row)
                file.write(np.ascontiguousarray(array))
            begin += len(part[0])
        file.flush()
        os.fsync(file.fileno())
