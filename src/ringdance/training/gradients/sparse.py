"""Reduce gradients that contain only some of a table's rows, for all frameworks.

Rows that occur several times on a rank are first summed on that rank. A small all-reduce then sums the row
counts of all ranks, so that all ranks choose the same route:

- "rows": rows are gathered, and equal rows are summed. Memory and time grow with the number of rows, not with
  the size of the table.
- "dense": each rank creates a dense table, all-reduces it, and extracts the rows that any rank has used. This
  is chosen if all ranks together have a large share of the table's rows, or if the table is small.

A rank never needs much more memory than one table, or the rows of all ranks. In particular, memory never
grows with the table's size times the number of ranks. Both routes give the same result: each row that any
rank has used, once, in ascending order.
While a rank has joined, only all-reduces work, so the choice is "dense". The setting ``sparse`` forces one
of the routes.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ringdance.core import labels
from ringdance.core.engine import Engine
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.errors import ArgumentError
from ringdance.training.collectives import Array, Call

_log = logging.getLogger("ringdance")

ROWS, DENSE = "rows", "dense"
# Measured with two ranks on one host: the dense route was faster if all ranks together had at least the share
# DENSE_FROM of the table's rows (0.2 for 128 columns, 0.27 for 16, 0.45 for one), or if the table's size was
# at most SMALL_BYTES.
DENSE_FROM = 0.3
SMALL_BYTES = 64 << 10
_FEW_RUNS = 64
_NARROW = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Args:
        keys: Row numbers (int64), of shape (n,).
        values: The row for each key, of shape (n, ...).
        table: Number of rows in the table, or -1 if unknown.
    """

    keys: Array
    values: Array
    table: int


_logged: weakref.WeakKeyDictionary[Engine, set[str]] = weakref.WeakKeyDictionary()


def merge(keys: Array, values: Array, divisor: int = 1) -> tuple[Array, Array]:
    """Return the unique keys in ascending order, and the sums of their values, divided by ``divisor``.

    16-bit floats are summed and divided in float32, and then rounded once.

    Args:
        keys: Keys (int64), of shape (n,).
        values: Values of shape (n, ...). The dtype must support addition and, unless ``divisor`` is 1,
            fractions.
        divisor: Number by which the sums are divided.
    """
    dtype = values.dtype
    starts = np.flatnonzero(keys[1:] <= keys[:-1]) + 1  # Where ascending runs (such as a rank's keys) start.
    if len(starts):
        order = np.argsort(keys, kind="stable")  # Rows with the same key stay in rank order.
        ascending = keys[order]
        first = np.concatenate([[True], ascending[1:] != ascending[:-1]])
        keys = ascending[first]
        if len(starts) < _FEW_RUNS:  # Two to eight times as fast as sorting the values.
            places = np.empty_like(order)
            places[order] = np.cumsum(first) - 1
            summed = np.zeros((len(keys), *values.shape[1:]), _widened(values[:0]).dtype)
            for begin, end in itertools.pairwise([0, *starts, len(places)]):
                rows = summed.take(places[begin:end], axis=0)  # take() is twice as fast as indexing.
                rows += values[begin:end]
                summed[places[begin:end]] = rows
            values = summed
        else:
            values = _widened(values[order])
            values = np.add.reduceat(values, np.flatnonzero(first), axis=0, dtype=values.dtype)
    if divisor != 1:
        values = np.ascontiguousarray(_widened(values))
        parts = values.view(values.real.dtype)  # Divide complex numbers as pairs of floats, like the engine.
        values = (parts / parts.dtype.type(divisor)).view(values.dtype)
    return keys, values.astype(dtype, copy=False)


def _widened(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype in _NARROW else values


def route_of(rows: int, table: int, row_bytes: int) -> str:
    """Return the faster route for the rows of a table.

    Args:
        rows: Total number of rows on all ranks, after each rank has merged its own.
        table: Number of rows in the table, or -1 if unknown.
        row_bytes: Size of a row's values in bytes.
    """
    if table < 0:
        return ROWS
    return DENSE if rows >= DENSE_FROM * table or table * row_bytes <= SMALL_BYTES else ROWS


class SparseExchange:
    """Sums or averages the rows of several tables over the ranks. ``wait()`` returns the result.

    All members of the process set must create their exchanges in the same order, with the same tables.

    Args:
        engine: Engine of this rank.
        parts: This rank's rows of each table. A rank without rows passes an empty part.
        names: Names of the tables for messages.
        name: Key that matches the ranks' calls. If ``None``, calls match by order.
        average: If True, sums are divided by the number of ranks.
        set_id: Id of the process set.
        pattern: Description of the step's gradients. See ``lists.pattern_of``.

    Attributes:
        routes: "rows" or "dense" for each table, after ``wait()``.

    Raises:
        ArgumentError: A key is not in the table. Peers get the same message.
    """

    def __init__(
        self, engine: Engine, parts: Sequence[Rows], names: Sequence[str], *, name: str | None = None,
        average: bool = False, set_id: int = 0, pattern: str = "",
    ) -> None:
        self.engine = engine
        self.names = list(names)
        self.name = name
        self.size = len(engine.members(set_id))
        self.average = average
        self.set_id = set_id
        self.routes: list[str] = []
        self.parts = [Rows(*merge(part.keys, part.values), part.table) for part in parts]
        # The number of rows for each table, then the number of ranks that exchange (joined ranks add zeros).
        self._counts = np.array([*(len(part.keys) for part in self.parts), 1], np.int64)
        if name and not labels.known(f"grouped_allreduce.{name}", len(names)):
            labels.note(f"grouped_allreduce.{name}", name, "rows of the gradients", self.names)
        self._first = self.first_call(name, set_id, pattern)
        self._check()
        self._agreed = self._first.submit(engine, (self._counts,), (self._counts,))

    @staticmethod
    def first_call(name: str | None, set_id: int = 0, pattern: str = "") -> Call:
        """Return the first call of an exchange, which sums the row counts."""
        return Call(Collective.ALLREDUCE, name, set_id=set_id, grouped=True, pattern=pattern)

    def _call(self, kind: Collective, what: str, operation: ReduceOp = ReduceOp.SUM) -> Call:
        name = None if self.name is None else f"{self.name}.{what}"
        return Call(kind, name, operation, set_id=self.set_id, grouped=True)

    def _check(self) -> None:
        for name, part in zip(self.names, self.parts, strict=True):
            if len(part.keys) and (part.keys[0] < 0 or 0 <= part.table <= part.keys[-1]):
                error = ArgumentError(
                    f"{name}: rows {int(part.keys[0])} to {int(part.keys[-1])} on rank {self.engine.rank} "
                    f"({self.engine.hosts[self.engine.rank]}), but the table has {part.table} rows."
                )
                self._first.refuse(self.engine, error)
                raise error

    def wait(self) -> list[Rows]:
        """Return the merged rows of all ranks for each table, with ascending, unique keys.

        Raises:
            CollectiveError: An exchange failed.
        """
        routes = self.routes = self._chosen()
        rows = [part for part, route in zip(self.parts, routes, strict=True) if route == ROWS]
        dense = [part for part, route in zip(self.parts, routes, strict=True) if route == DENSE]
        results = {ROWS: iter(self._gathered(rows)), DENSE: iter(self._summed(dense))}
        return [next(results[route]) for route in routes]

    def _chosen(self) -> list[str]:
        self._agreed.wait()
        *counts, present = self._counts.tolist()
        forced = DENSE if present < self.size else self.engine.settings.sparse
        routes = []
        for name, part, count in zip(self.names, self.parts, counts, strict=True):
            row_bytes = int(math.prod(part.values.shape[1:]) * part.values.dtype.itemsize)
            route = route_of(count, part.table, row_bytes)
            if part.table >= 0 and forced != "auto":
                route = forced
            self._log(name, part.table, count, route)
            routes.append(route)
        return routes

    def _log(self, name: str, table: int, count: int, route: str) -> None:
        """Log the route of a table, once, on the lowest rank."""
        logged = _logged.setdefault(self.engine, set())
        if name in logged:
            return
        logged.add(name)
        if self.engine.rank == self.engine.members(self.set_id)[0]:
            _log.info(
                "ringdance: the gradient of %s is exchanged %s: %d ranks have %d rows in total, and the "
                "table has %s rows (setting sparse=%s).",
                name, "as rows" if route == ROWS else "as a dense table", self.size, count,
                table if table >= 0 else "an unknown number of", self.engine.settings.sparse,
            )

    def _gathered(self, parts: Sequence[Rows]) -> list[Rows]:
        if not parts:
            return []
        views = [view for part in parts for view in (part.keys, np.ascontiguousarray(part.values))]
        gathered = self._call(Collective.ALLGATHER, "rows").submit(self.engine, tuple(views)).wait()
        divisor = self.size if self.average else 1
        return [
            Rows(*merge(gathered[2 * index], gathered[2 * index + 1], divisor), part.table)
            for index, part in enumerate(parts)
        ]

    def _summed(self, parts: Sequence[Rows]) -> list[Rows]:
        if not parts:
            return []
        tables = [np.zeros((part.table, *part.values.shape[1:]), part.values.dtype) for part in parts]
        used = [np.zeros(part.table, np.uint8) for part in parts]
        for part, table, mask in zip(parts, tables, used, strict=True):
            table[part.keys] = part.values
            mask[part.keys] = 1
        operation = ReduceOp.AVERAGE if self.average else ReduceOp.SUM
        works = [
            self._call(Collective.ALLREDUCE, what, how).submit(self.engine, tuple(views), tuple(views))
            for what, views, how in (("dense", tables, operation), ("used", used, ReduceOp.MAX))
        ]
        for work in works:
            work.wait()
        keys = [np.flatnonzero(mask) for mask in used]
        return [
            Rows(rows, table if len(rows) == len(table) else table[rows], len(table))
            for rows, table in zip(keys, tables, strict=True)
        ]


def submit(call: Call, engine: Engine, inputs: Sequence[Array]) -> Work:
    """Submit a call. If the call has ``tables``, this starts a ``SparseExchange``.

    Args:
        call: An allreduce (Sum or Average) of rows of ``call.tables``, or any other call.
        engine: Engine of this rank.
        inputs: For each table: its values, its keys, and its number of rows (a scalar).

    Returns:
        A ``Work`` whose results are in the same order as ``inputs``. Keys keep their dtype.
    """
    if not call.tables:
        return call.submit(engine, tuple(inputs))
    request, name = Request(Description(Collective.ALLREDUCE)), call.name or ""
    if len(engine.members(call.set_id)) == 1:
        alone = Work(request, name, lambda _, __: None)
        alone.finish([array.copy() for array in inputs])
        return alone
    columns = list(zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True))
    parts = [Rows(keys.astype(np.int64, copy=False), values, int(table)) for values, keys, table in columns]
    exchange = SparseExchange(
        engine, parts, call.tables, name=call.name, average=call.operation is ReduceOp.AVERAGE,
        set_id=call.set_id, pattern=call.pattern,
    )

    def finish(work: Work, _: float | None) -> None:
        results: list[Array] = []
        for rows, (_values, keys, table) in zip(exchange.wait(), columns, strict=True):
            results += [rows.values, rows.keys.astype(keys.dtype, copy=False), table]
        work.finish(results)

    return Work(request, name, finish)
