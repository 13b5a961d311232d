"""The collectives on JAX arrays: at once, or within ``jit``, ``grad`` and control flow. Contract 2.2, 3.6.

Within ``jit`` all shapes are fixed when the program is recorded: there ``allgather`` and ``alltoall`` need
equally many rows on all ranks, and ``splits`` cannot be given. Unnamed calls match by order, which XLA keeps.
Gradients are for ``grad`` and ``vjp``; forward-mode differentiation (``jvp``) is not defined. ``vmap`` makes
one exchange of the whole batch. Arrays that are sharded over several devices of this process are exchanged
whole; within ``shard_map`` there is an error. A failure within ``jit`` arrives as
``jax.errors.JaxRuntimeError`` with the message of the error that is raised outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringdance import session
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError
from ringdance.jax.compression import Compression
from ringdance.jax.exchange import Exchange, Shapes, compiled, eager, is_traced
from ringdance.jax.programs import settle
from ringdance.training import collectives
from ringdance.training.checks import pick_operation
from ringdance.training.collectives import Call
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather", "allreduce", "alltoall", "barrier",
    "broadcast", "grouped_allgather", "grouped_allreduce", "grouped_broadcast", "grouped_reducescatter",
    "join", "reducescatter",
]

Values = Sequence[Any]

Average = int(ReduceOp.AVERAGE)
Sum = int(ReduceOp.SUM)
Adasum = int(ReduceOp.ADASUM)
Min = int(ReduceOp.MIN)
Max = int(ReduceOp.MAX)
Product = int(ReduceOp.PRODUCT)

_NO_SPLITS = "alltoall(splits=...) gives results of unknown shape: call it outside of jit."


# Gradients.


def _plain(what: Exchange, shapes: Shapes, values: Values) -> tuple[Any, ...]:
    if not is_traced(values):
        return tuple(eager(what, values))
    dtypes = [value.dtype for value in values]
    if what.call.kind is Collective.ALLTOALL:
        dtypes.append(np.dtype(np.int32))
        size = len(session.engine().members(what.call.set_id))
        if what.splits is not None:
            raise ArgumentError(_NO_SPLITS)
        if what.rows[0] % size:
            raise ArgumentError(f"alltoall: {what.rows[0]} rows cannot be cut equally for {size} ranks.")
    return tuple(compiled(what, values, shapes, dtypes))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recorded(what: Exchange, shapes: Shapes, *values: Any) -> tuple[Any, ...]:
    """Return what the exchange gives; ``shapes`` are those of the results within ``jit``."""
    return _plain(what, shapes, values)


def _forward(what: Exchange, shapes: Shapes, *values: Any) -> tuple[tuple[Any, ...], Any]:
    results = _recorded(what, shapes, *values)
    return results, results[-1] if what.call.kind is Collective.ALLTOALL else None


def _backward(what: Exchange, shapes: Shapes, received: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    if what.back:
        raise NotImplementedError(f"The gradient of {what.call.kind.name.lower()} has no gradient here.")
    call = what.call if what.call.name is None else what.call.but(name=f"{what.call.name}.grad")
    if call.kind is Collective.ALLTOALL:
        return (_alltoall_back(call, what.rows[0], received, gradients[0]),)
    # Integers have no gradient, and what JAX passes for them cannot be exchanged.
    places = [place for place, one in enumerate(gradients) if one.dtype != jax.dtypes.float0]
    chosen = [gradients[place] for place in places]
    shapes = tuple([one.shape for one in chosen])
    rows: tuple[int, ...] = ()
    if what.rows:
        rows = tuple([what.rows[place] for place in places])
        shapes = tuple([(count, *one.shape[1:]) for count, one in zip(rows, chosen, strict=True)])
    back = Exchange(call, call.kind is not Collective.ALLREDUCE, None, rows)
    done = iter(_recorded(back, shapes, *chosen) if chosen else ())
    return tuple([next(done) if place in places else None for place in range(len(gradients))])


def _alltoall_back(call: Call, rows: int, received: Any, gradient: Any) -> Any:
    """The gradient goes back the way the rows came; rows that were not sent get zeros."""
    splits = None if is_traced((received,)) else tuple(np.asarray(received).tolist())
    if splits is not None and is_traced((gradient,)) and len(set(splits)) == 1:
        splits = None
    back = Exchange(call, splits=splits, rows=(gradient.shape[0],))
    returned, _ = _recorded(back, (gradient.shape, received.shape), gradient)
    missing = rows - returned.shape[0]
    if missing:
        returned = jnp.concatenate([returned, jnp.zeros((missing, *returned.shape[1:]), returned.dtype)])
    return returned


_recorded.defvjp(_forward, _backward)


def _exchange(what: Exchange, values: Values, shapes: Shapes) -> list[Any]:
    if not is_traced(values):
        return list(eager(what, values))
    call = what.call
    alone = len(session.engine().members(call.set_id)) == 1 and what.splits is None
    if alone and call.prescale == call.postscale == 1.0:
        return [*values, jnp.array(what.rows, np.int32)] if call.kind is Collective.ALLTOALL else list(values)
    return list(_recorded(what, shapes, *values))


def _group(values: Values) -> list[Any]:
    group = [value if isinstance(value, jax.Array) else jnp.asarray(value) for value in values]
    if not group:
        raise ArgumentError("A group needs at least one array.")
    return group


def _with_rows(verb: str, values: Values) -> tuple[int, ...]:
    for value in values:
        if not value.ndim:
            raise ArgumentError(f"{verb} needs arrays with at least one dimension; use x.reshape(1).")
    return tuple([value.shape[0] for value in values])


# The collectives.


def allreduce(
    array: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of ``array`` over all ranks: same shape and type, differentiable.

    Args:
        array: equal shape and type on all ranks.
        name: key that matches the ranks' calls; without one they match by order.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies the input of each rank.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``.

    Raises:
        ArgumentError: an argument is wrong; only this rank may see it.
        MismatchError: ranks called it with different shapes, types or operations; raised on all.
    """
    arguments = name, op, prescale_factor, postscale_factor, process_set, compression
    return _allreduce([array], *arguments, False)[0]


def grouped_allreduce(
    arrays: Values, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
    compression: Any = Compression.none,
) -> list[Any]:
    """Return the reductions of several arrays, in one exchange; as ``allreduce``."""
    return _allreduce(arrays, name, op, prescale_factor, postscale_factor, process_set, compression, True)


def _allreduce(
    arrays: Values, name: str | None, op: int | None, prescale: float, postscale: float,
    process_set: ProcessSet, compression: Any, grouped: bool,
) -> list[Any]:
    packed = [compression.compress(array) for array in _group(arrays)]
    small = [one for one, _ in packed]
    call = Call(
        Collective.ALLREDUCE, name, pick_operation(None, op), float(prescale), float(postscale),
        set_id(process_set), grouped=grouped,
    )
    reduced = _exchange(Exchange(call), small, tuple([one.shape for one in small]))
    pairs = zip(reduced, packed, strict=True)
    return [compression.decompress(one, context) for one, (_, context) in pairs]


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the ranks' arrays joined along dimension 0, differentiable.

    That dimension may differ between ranks, but not within ``jit``.
    """
    return _allgather([array], name, process_set, False)[0]


def grouped_allgather(
    arrays: Values, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several arrays; as ``allgather``."""
    return _allgather(arrays, name, process_set, True)


def _allgather(arrays: Values, name: str | None, process_set: ProcessSet, grouped: bool) -> list[Any]:
    group = _group(arrays)
    number = set_id(process_set)
    rows = _with_rows("allgather", group)
    size = len(session.engine().members(number))
    shapes = tuple([(size * one.shape[0], *one.shape[1:]) for one in group])
    call = Call(Collective.ALLGATHER, name, set_id=number, grouped=grouped)
    return _exchange(Exchange(call, rows=rows), group, shapes)


def broadcast(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the array of global rank ``root_rank``; shape and type equal on all ranks; differentiable."""
    return _broadcast([array], root_rank, name, process_set, False)[0]


def grouped_broadcast(
    arrays: Values, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Broadcast several arrays in one exchange; as ``broadcast``."""
    return _broadcast(arrays, root_rank, name, process_set, True)


def _broadcast(
    arrays: Values, root: int, name: str | None, process_set: ProcessSet, grouped: bool
) -> list[Any]:
    group = _group(arrays)
    call = Call(Collective.BROADCAST, name, set_id=set_id(process_set), root=int(root), grouped=grouped)
    return _exchange(Exchange(call), group, tuple([one.shape for one in group]))


def alltoall(
    array: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send ``splits[j]`` rows to rank j of the set, receive theirs in rank order; differentiable.

    Args:
        array: at least one dimension; all but the first equal on all ranks.
        splits: integers, one for each rank; their sum may be less than the rows. Not within ``jit``.
            Without it all ranks get equally many.
        name: key that matches the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        The received rows; with ``splits`` also how many came from each rank (int32).
    """
    group, number = _group([array]), set_id(process_set)
    if splits is not None and is_traced((splits,)):
        raise ArgumentError(_NO_SPLITS)
    cut = None if splits is None else tuple(np.asarray(splits).tolist())
    size = len(session.engine().members(number))
    call = Call(Collective.ALLTOALL, name, set_id=number)
    what = Exchange(call, splits=cut, rows=_with_rows("alltoall", group))
    output, received = _exchange(what, group, (group[0].shape, (size,)))
    return output if splits is None else (output, received)


def reducescatter(
    array: Any, name: str | None = None, op: int | None = None,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce (Average or Sum) and return this rank's rows: d // n of d, the first d % n ranks one more."""
    return _reducescatter([array], name, op, process_set, prescale_factor, postscale_factor, False)[0]


def grouped_reducescatter(
    arrays: Values, name: str | None = None, op: int | None = None,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several arrays; as ``reducescatter``."""
    return _reducescatter(arrays, name, op, process_set, prescale_factor, postscale_factor, True)


def _reducescatter(
    arrays: Values, name: str | None, op: int | None, process_set: ProcessSet, prescale: float,
    postscale: float, grouped: bool,
) -> list[Any]:
    group, number = _group(arrays), set_id(process_set)
    engine = session.engine()
    members = engine.members(number)
    place = members.index(engine.rank) if engine.rank in members else 0
    rows = _with_rows("reducescatter", group)
    own = [count // len(members) + (place < count % len(members)) for count in rows]
    shapes = tuple([(count, *one.shape[1:]) for count, one in zip(own, group, strict=True)])
    call = Call(
        Collective.REDUCESCATTER, name, pick_operation(None, op), float(prescale), float(postscale), number,
        grouped=grouped,
    )
    return _exchange(Exchange(call, rows=rows), group, shapes)


def join() -> int:
    """Say that this rank has no more data; help the others with zeros until all have joined.

    Returns:
        The global rank that joined last, the same on all.
    """
    settle()
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return after all ranks of the set have called it."""
    settle()
    collectives.barrier(session.engine(), set_id(process_set))
