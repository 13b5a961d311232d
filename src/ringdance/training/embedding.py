"""An embedding table in host memory. Each step reads and updates only some of its rows.

The framework sees only the rows that a step uses, and computes their gradient as for any dense tensor. The
time and memory for a step therefore do not depend on the size of the table. A table is either replicated (all
ranks hold all rows) or sharded (row r is held by rank r % size).
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
from ringdance.training.collectives import Array, Call
from ringdance.training.gradients.sparse import Rows, SparseExchange, merge
from ringdance.training.objects import broadcast_object

__all__ = ["EmbeddingTable"]

_CHUNK = 1 << 16  # Number of rows to initialize, send, read or write at a time.
_STEP = 2048  # Number of rows to update at a time, small enough to fit in the CPU's cache.
_TINY = np.finfo(np.float32).tiny

_tables: weakref.WeakSet[EmbeddingTable] = weakref.WeakSet()


def forget_lookups() -> None:
    """Discard the lookups of a failed step in all tables, because no ``update`` will follow them."""
    for table in list(_tables):
        table._lookups.clear()


class EmbeddingTable:
    """A table of float32 rows that are looked up by row number and updated by Adagrad.

    All ranks must make the same calls. In each step::

        rows, places = table.lookup(ids)     # rows[places] are the embeddings, of shape (*ids.shape, columns)
        ...                                  # the gradient of this rank's loss with respect to rows
        table.update(gradient)

    Args:
        rows: Number of rows in the whole table.
        columns: Number of columns (the embedding dimension).
        rate: Learning rate. May be changed at any time.
        scale: Standard deviation of the normal distribution from which initial values are drawn.
        accumulator: Initial sum of squared gradients, 0 or more. Larger values make the first steps smaller.
            The default is the same as in Keras and TensorFlow. While the squares of the gradients sum to much
            less than this value (as with a loss that is a mean over the batch), updates are like SGD with a
            learning rate of rate / sqrt(accumulator).
        sharded: If True, each rank holds only its own part of the rows, and ``lookup`` is a collective call.
        seed: Seed for the initial values, which do not depend on the number of ranks.
        name: Key that matches the ranks' calls. Also appears in messages.

    Attributes:
        rows, columns, rate, sharded, name: The arguments with these names.
        values, accumulators: Arrays of shape (rows on this rank, columns).

    Source: Duchi, Hazan, Singer: Adaptive subgradient methods, JMLR 2011.
    """

    def __init__(
        self, rows: int, columns: int, *, rate: float = 0.05, scale: float = 0.01, accumulator: float = 0.1,
        sharded: bool = False, seed: int = 0, name: str = "embedding",
    ) -> None:
        if rows < 1 or columns < 1:
            raise ArgumentError(f"EmbeddingTable({rows}, {columns}): rows and columns must be positive.")
        if not 0 <= accumulator < np.inf:
            raise ArgumentError(f"EmbeddingTable: accumulator={accumulator} must be finite and not negative.")
        engine = session.engine()
        self.rows, self.columns, self.rate, self.name = rows, columns, rate, name
        self.sharded = sharded and engine.size > 1
        self._rank, self._size = (engine.rank, engine.size) if self.sharded else (0, 1)
        local_rows = len(range(self._rank, rows, self._size))
        self.values = np.empty((local_rows, columns), np.float32)
        self.accumulators = np.full((local_rows, columns), accumulator, np.float32)
        self._lookups: list[_Lookup] = []
        _tables.add(self)
        for begin, end in self._chunks():
            random = np.random.Generator(np.random.SFC64([seed, begin]))
            drawn = random.standard_normal((end - begin, columns), np.float32)
            drawn *= scale
            self._own(self.values, begin, end)[:] = drawn[self._first(begin) :: self._size]

    def lookup(self, ids: Any, training: bool = True) -> tuple[Array, Array]:
        """Return the distinct rows that ``ids`` select, and the index into these rows for each id.

        Args:
            ids: Row numbers: an integer array of any shape, or a tensor in host memory.
            training: True if an ``update`` with the gradient of these rows will follow.

        Returns:
            The rows, with shape (n, columns), and the indices (int64), with the shape of ``ids``.

        Raises:
            ArgumentError: An id is not a valid row number. Peers get the same message.
        """
        ids = np.asarray(ids)
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if not 0 <= low <= high < self.rows or (ids.size and ids.dtype.kind not in "iu"):
            engine = session.engine()
            error = ArgumentError(
                f"{self.name}: ids {low} to {high} ({ids.dtype}) on rank {engine.rank} "
                f"({engine.hosts[engine.rank]}) are not valid: use integers from 0 to {self.rows - 1}."
            )
            first = SparseExchange.first_call(self.name)
            if self.sharded:
                first = Call(Collective.ALLTOALL, f"{self.name}.ids")
            first.refuse(engine, error)
            raise error
        keys, places = _unique(ids.reshape(-1).astype(np.int64, copy=False))
        lookup = _Lookup(keys)
        values = self._ask(lookup) if self.sharded else self.values.take(keys, axis=0)
        if training:
            self._lookups.append(lookup)
        return values, places.reshape(ids.shape)

    def update(self, *gradients: Any) -> None:
        """Update rows with the mean of the ranks' gradients. A collective call.

        Args:
            gradients: For each ``lookup`` since the last update, the gradient with respect to its rows. The
                gradients are summed, as if the lookups were parts of one batch.

        Raises:
            ArgumentError: The gradients do not match the lookups.
        """
        lookups, self._lookups = self._lookups, []
        arrays = [np.asarray(gradient, np.float32) for gradient in gradients]
        if [array.shape for array in arrays] != [(len(lookup.keys), self.columns) for lookup in lookups]:
            raise ArgumentError(
                f"{self.name}: pass one gradient for each lookup since the last update. Expected shapes: "
                f"{[(len(lookup.keys), self.columns) for lookup in lookups]}. Received: "
                f"{[array.shape for array in arrays]}. Use training=False for a lookup without an update. "
                "These lookups have been discarded."
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
        squares = self.accumulators.take(keys, axis=0)  # take() is twice as fast as indexing.
        squares += gradient * gradient
        self.accumulators[keys] = squares
        np.maximum(squares, _TINY, out=squares)  # Avoids 0 / 0 if both the sum and the gradient are 0.
        np.sqrt(squares, out=squares)
        np.divide(gradient, squares, out=squares)
        squares *= self.rate
        values = self.values.take(keys, axis=0)
        values -= squares
        self.values[keys] = values

    def _ask(self, lookup: _Lookup) -> Array:
        """Request rows from the ranks that hold them."""
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
        """Send gradients to the ranks that hold their rows. Return this rank's rows and their gradients."""
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
        """Return a function that writes the table as it is now, for ``Checkpoints.save``. A collective call.

        A replicated table is copied, so that the function can write the copy in the background. No rank can
        hold all rows of a sharded table, so rank 0 writes them before this call returns, and the function
        does nothing.

        Args:
            path: Path of the file, used only on rank 0. Nothing else may write to it before the returned
                function has finished.

        Raises:
            OSError: Rank 0 could not write a sharded table. Raised on all ranks.
        """
        if self.sharded:
            self.save(path)
        if self.sharded or session.engine().rank != 0:
            return lambda: None
        state = self.values.copy(), self.accumulators.copy()
        return lambda: _write(Path(path), self.rows, self.columns, iter([state]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole table, including accumulators. A collective call. Rank 0 writes the file.

        The ``.npy`` file contains a float32 array of shape (2, rows, columns): values, then accumulators.

        Raises:
            OSError: Rank 0 could not write the file. Raised on all ranks.
        """
        problem: OSError | None = None
        parts = self._gathered()
        if session.engine().rank == 0:
            try:
                _write(Path(path), self.rows, self.columns, parts)
            except OSError as error:
                problem = error
        for _ in parts:  # Even after an error, all ranks must run the remaining collectives.
            pass
        if problem := broadcast_object(problem, name=f"{self.name}.saved"):
            raise problem

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file written by ``save`` on any number of ranks. A collective call. Rank 0 reads the file.

        Earlier lookups are discarded. Do not pass their gradients to ``update``.

        Raises:
            ArgumentError: The file is damaged, or its table has a different shape. Raised on all ranks.
            OSError: Rank 0 could not read the file. Raised on all ranks.
        """
        self._lookups.clear()
        saved: Array = np.empty(0)
        problem: Exception | None = None
        if session.engine().rank == 0:
            try:
                saved = np.load(path, mmap_mode="r")
                if saved.shape != (2, self.rows, self.columns):
                    problem = ArgumentError(
                        f"{path} has a table of shape {saved.shape[1:]} instead of "
                        f"{(self.rows, self.columns)}."
                    )
            except OSError as error:
                problem = error
            except (ValueError, EOFError) as error:  # EOFError: the file is empty.
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
        """Yield the values and accumulators of the whole table, one part at a time, in order."""
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
        """Return the offset of this rank's first row among the table rows from ``begin`` on."""
        return (self._rank - begin) % self._size

    def _own(self, array: Array, begin: int, end: int) -> Array:
        """Return the elements of ``array`` (this rank's rows) for table rows ``begin`` to ``end - 1``."""
        local = (begin + self._first(begin)) // self._size
        return array[local : local + len(range(begin + self._first(begin), end, self._size))]


class _Lookup:
    """The rows of a lookup and, if the table is sharded, how they were exchanged.

    Attributes:
        keys: Row numbers, ascending and unique.
        order: Permutation that sorts the keys by the rank that holds the row.
        sent, received: Number of rows that this rank requested from each rank, and each rank from this one.
        asked: The rows that ranks requested from this rank, as indices into its part of the table.
    """

    order: Array
    sent: Array
    received: Array
    asked: Array

    def __init__(self, keys: Array) -> None:
        self.keys = keys


def _unique(ids: Array) -> tuple[Array, Array]:
    """Return the unique ids in ascending order, and the index into them for each id, like np.unique.

    Packing each id and its position into one integer, and sorting these, is faster than an argsort and an
    indirect lookup. The ids are row numbers of a table in memory, so both fit into 63 bits.
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
    """Write the parts of a table to a file, as one array."""
    # Not memory-mapped, because a full disk would then cause SIGBUS instead of an OSError.
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
