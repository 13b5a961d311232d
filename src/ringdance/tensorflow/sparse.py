"""Reduce ``tf.IndexedSlices`` eagerly, in a ``tf.function`` and in graphs of v1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringdance.tensorflow.exchange import perform
from ringdance.training.collectives import Call

__all__ = ["reduce_rows"]

Tensor = Any
Run = Callable[[Call, Sequence[Tensor]], list[Tensor]]


def reduce_rows(
    call: Call, slices: Sequence[Any], names: Sequence[str], run: Run, tables: Sequence[int | None] = ()
) -> list[Any]:
    """Return the rows of all ranks as IndexedSlices: ascending indices, each once. Differentiable.

    Args:
        call: an all-reduce: Average or Sum, its name and process set.
        slices: this rank's rows of each table.
        names: of the tables, for messages.
        run: runs the call.
        tables: how many rows each table has, ``None`` where that is not known; without, as the slices say.
    """
    call = call.but(tables=tuple(names))
    given: list[Tensor] = []
    for index, one in enumerate(slices):
        given += [one.values, one.indices, _rows_of_table(one, tables[index] if tables else None)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(*tensors: Tensor) -> Any:
        results = run(call, tensors)

        def gradient(*upstream: Tensor) -> list[Tensor]:
            return _gradient(call, tensors, results, upstream)

        return tuple(results), gradient

    results = reduced(*given)
    return [
        tf.IndexedSlices(results[3 * index], results[3 * index + 1], one.dense_shape)
        for index, one in enumerate(slices)
    ]


def _rows_of_table(one: Any, known: int | None) -> Tensor:
    if known is not None:
        return tf.constant(known, tf.int64)
    return tf.constant(-1, tf.int64) if one.dense_shape is None else tf.cast(one.dense_shape[0], tf.int64)


def _gradient(
    call: Call, given: Sequence[Tensor], results: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """Reduce the gradients of the resulting rows; return for each input row that of its row."""
    name = None if call.name is None else f"{call.name}.grad"
    arrived = [tf.convert_to_tensor(one) for one in upstream[::3]]
    back = perform(call.but(name=name, tables=(), grouped=True), arrived)
    gradients: list[Tensor] = []
    for index, one in enumerate(back):
        rows = tf.searchsorted(results[3 * index + 1], given[3 * index + 1])
        gradients += [tf.gather(one, rows), None, None]
    return gradients
