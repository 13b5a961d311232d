"""Collectives on JAX arrays: eager, or within ``jit``, ``grad`` and control flow.

Within ``jit``, all shapes are fixed when the program is traced. ``allgather`` and ``alltoall`` therefore need
the same number of rows on all ranks, and ``splits`` is not supported. Unnamed calls match by order, which XLA
preserves. ``grad`` and ``vjp`` are supported. Forward-mode differentiation (``jvp``) and ``vmap`` are not.
Exchange the whole batch outside of ``vmap``. An array that is sharded over several devices of this process is
exchanged as a whole. A collective within ``shard_map`` raises an error. A failure within ``jit`` is raised as
a ``jax.errors.JaxRuntimeError`` with the same message as the error that would be raised outside of ``jit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringdance.core import labels
from ringdance.core.recorder import StepMark
from ringdance.core.request import Collective
from ringdance.errors import ArgumentError
from ringdance.jax.exchange import JaxCall, Shapes, compiled, eager, in_program, is_traced
from ringdance.jax.memory import Compression, exact
from ringdance.jax.programs import settle
from ringdance.training import collectives, session
from ringdance.training.collectives import Call, Keep, allreduce_call, movement, reducescatter_call
from ringdance.training.gradients import weights
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allgather", "grouped_allreduce",
    "grouped_broadcast", "grouped_reducescatter", "join", "reducescatter",
]

Values = Sequence[Any]

_NO_SPLITS = "The result of alltoall(splits=...) has an unknown shape within jit. Call it outside of jit."


# Gradients.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recorded(what: JaxCall, shapes: Shapes, *values: Any) -> tuple[Any, ...]:
    """Run an exchange and return its results. ``shapes`` are the shapes of the results within ``jit``."""
    if not is_traced(values):
        return tuple(eager(what, values, shapes))
    dtypes = [value.dtype for value in values]
    if what.call.kind is Collective.ALLTOALL:
        dtypes.append(np.dtype(np.int32))
        size = len(session.engine().members(what.call.set_id))
        if what.splits is not None:
            raise ArgumentError(_NO_SPLITS)
        if what.rows[0] % size:
            raise ArgumentError(
                f"Within jit, alltoall sends equal shares, but {what.rows[0]} rows cannot be divided evenly "
                f"among {size} ranks. Call alltoall(splits=...) outside of jit."
            )
    return compiled(what, values, shapes, dtypes)


def _forward(what: JaxCall, shapes: Shapes, *values: Any) -> tuple[tuple[Any, ...], Any]:
    results = _recorded(what, shapes, *values)
    return results, results[-1] if what.call.kind is Collective.ALLTOALL else None


def _backward(what: JaxCall, shapes: Shapes, received: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    engine = session.engine()
    rule = what.call.backward(engine)
    if what.call.kind is Collective.ALLTOALL:
        return (_alltoall_back(rule.call, what.rows[0], received, gradients[0]),)
    # optax passes Python numbers to the vjp functions of losses.
    gradients = tuple([value if hasattr(value, "dtype") else jnp.asarray(value) for value in gradients])
    # Integers have no gradients, and the placeholders that JAX uses for them cannot be exchanged.
    floating = [index for index, gradient in enumerate(gradients) if gradient.dtype != jax.dtypes.float0]
    if not floating:
        return (None,) * len(gradients)
    chosen = [gradients[index] for index in floating]
    rows = [what.rows[index] for index in floating] if what.rows else []
    shapes = tuple([gradient.shape for gradient in chosen])
    if what.call.kind is Collective.REDUCESCATTER:
        chosen = [gradient * rule.scale for gradient in chosen]
        shapes = tuple([(count, *gradient.shape[1:]) for count, gradient in zip(rows, chosen, strict=True)])
    back = JaxCall(rule.call, rows=_shapes(rule.call, chosen)[1])
    results = _recorded(back, shapes, *chosen)
    if rule.keep is Keep.ROOT and engine.rank != what.call.root:
        results = tuple(map(jnp.zeros_like, results))
    if rule.keep is Keep.OWN_ROWS:
        counts = _run(Call(Collective.ALLGATHER, set_id=what.call.set_id), [jnp.array([rows])])[0]
        first = counts[: engine.members(what.call.set_id).index(engine.rank)].sum(axis=0)
        slices = zip(results, first, rows, strict=True)
        results = tuple([jax.lax.dynamic_slice_in_dim(*args) for args in slices])
    remaining = iter(results)
    return tuple([next(remaining) if index in floating else None for index in range(len(gradients))])


def _alltoall_back(call: Call, rows: int, received: Any, gradient: Any) -> Any:
    """Send each row of the gradient back to the rank that sent the corresponding input row.

    The gradients of rows that were not sent are zero.
    """
    splits = None if is_traced((received,)) else tuple(np.asarray(received).tolist())
    if splits is not None and is_traced((gradient,)) and len(set(splits)) == 1:
        splits = None
    back = JaxCall(call, splits=splits, rows=(gradient.shape[0],))
    returned, _ = _recorded(back, (gradient.shape, received.shape), gradient)
    return jnp.pad(returned, [(0, rows - returned.shape[0]), *[(0, 0)] * (returned.ndim - 1)])


_recorded.defvjp(_forward, _backward)


def _run(
    call: Call, arrays: Values, splits: tuple[int, ...] | None = None, compression: Any = Compression.none
) -> list[Any]:
    """Exchange arrays immediately or in the traced program. An alltoall also returns the received splits."""
    traced = in_program(arrays)
    if traced:  # Programs support only JAX's data types.
        arrays = [jnp.asarray(array) for array in arrays]
    pairs = [compression.compress(exact(array)) for array in arrays]
    if not pairs:
        raise ArgumentError("The list of arrays is empty. Pass at least one array.")
    values = [value for value, _ in pairs]
    shapes, rows = _shapes(call, values)
    what = JaxCall(call, splits=splits, rows=rows)
    alone = session.engine().size == 1 and splits is None
    if not traced:
        results = eager(what, values, shapes)
    elif alone and call.prescale == call.postscale == 1.0:
        results = [*values, jnp.array(rows, np.int32)] if call.kind is Collective.ALLTOALL else values
    else:
        results = list(_recorded(what, shapes, *values))
    restored = zip(results, pairs, strict=False)
    return [compression.decompress(out, context) for out, (_, context) in restored] + results[len(pairs) :]


def _shapes(call: Call, values: Values) -> tuple[Shapes, tuple[int, ...]]:
    """Return the results' shapes, given equal row counts on all ranks, and each input's row count."""
    if call.keeps_shapes:
        return tuple([value.shape for value in values]), ()
    if not all(value.ndim for value in values):
        name = call.kind.name.lower()
        raise ArgumentError(f"{name} needs arrays with at least one dimension. Reshape scalars to (1,).")
    engine = session.engine()
    members = engine.members(call.set_id)
    size, rows = len(members), tuple([value.shape[0] for value in values])
    if call.kind is Collective.ALLTOALL:
        return (values[0].shape, (size,)), rows
    if call.kind is Collective.ALLGATHER:
        counts = [size * count for count in rows]
    elif call.kind is Collective.REDUCESCATTER:
        set_rank = members.index(engine.rank) if engine.rank in members else 0
        counts = [count // size + (set_rank < count % size) for count in rows]
    else:
        raise AssertionError(f"_shapes() does not support the collective {call.kind.name}.")
    return tuple([(count, *value.shape[1:]) for count, value in zip(counts, values, strict=True)]), rows


# The collectives.


def allreduce(
    array: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of ``array`` over all ranks, with the same shape and dtype. Differentiable.

    Args:
        array: Array with the same shape and dtype on all ranks.
        name: Key that matches the ranks' calls. Unnamed calls match by order.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Factor applied to each rank's input.
        postscale_factor: Factor applied to the result.
        process_set: The participating ranks.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``.

    Raises:
        ArgumentError: An argument is invalid. Other ranks do not necessarily raise this error.
        MismatchError: Shapes, dtypes or operations differ between ranks. Raised on all ranks.
    """
    call = allreduce_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return _run(call, [array], None, compression)[0]


def grouped_allreduce(
    arrays: Values, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *,
    compression: Any = Compression.none,
) -> list[Any]:
    """Reduce several arrays in one exchange. See ``allreduce``."""
    call = allreduce_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return _run(call, arrays, None, compression)


def reduce_gradients(
    arrays: Values, name: str, op: int, prescale: float, postscale: float, process_set: ProcessSet,
    pattern: str, compression: Any = Compression.none, parameters: Sequence[str] = (),
) -> list[Any]:
    """Reduce a step's gradients and mark the end of the step. ``parameters`` are the parameters' names."""
    labels.note(f"grouped_allreduce.{name}", name, "gradients", parameters)
    call = allreduce_call(name, None, op, prescale, postscale, process_set, True, StepMark.OPTIMIZER, pattern)
    return _run(call, arrays, None, compression)


def compare_weights(
    arrays: Values, names: Sequence[str], exchange: str, advice: str, process_set: ProcessSet
) -> None:
    """Compare an exchange's parameters between ranks, if a comparison is due. See ``weights``."""
    traced, engine = in_program(arrays), session.engine()
    if not traced and not weights.due(engine, set_id(process_set), exchange):
        return

    def take(one: Any) -> tuple[int, Any]:
        if jnp.iscomplexobj(one):
            one = jnp.stack([one.real, one.imag])
        if not jnp.issubdtype(one.dtype, jnp.floating):
            raise TypeError("Only floating-point arrays can be compared.")
        sample = jnp.ravel(jax.lax.stop_gradient(one))[:: weights.step_of(one.size)].astype(jnp.float32)
        return one.size, sample if traced else np.asarray(sample)

    call = weights.call_of(exchange, names, advice, set_id(process_set))
    sample = (jnp if traced else np).concatenate([*weights.rows_of(arrays, take)])
    if traced:
        compiled(JaxCall(call), [sample], (), ())
    else:
        weights.compare(engine, call, sample)


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the ranks' arrays concatenated along dimension 0. Differentiable.

    The length of dimension 0 may differ between ranks, except within ``jit``.
    """
    return _run(movement(Collective.ALLGATHER, name, process_set), [array])[0]


def grouped_allgather(
    arrays: Values, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several arrays in one exchange. See ``allgather``."""
    return _run(movement(Collective.ALLGATHER, name, process_set, grouped=True), arrays)


def broadcast(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the array from global rank ``root_rank``. Differentiable.

    The array must have the same shape and dtype on all ranks.
    """
    return _run(movement(Collective.BROADCAST, name, process_set, root=root_rank), [array])[0]


def grouped_broadcast(
    arrays: Values, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Broadcast several arrays in one exchange. See ``broadcast``."""
    return _run(movement(Collective.BROADCAST, name, process_set, grouped=True, root=root_rank), arrays)


def alltoall(
    array: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send ``splits[j]`` rows to rank j of the set. Returns the received rows in rank order. Differentiable.

    Args:
        array: Array with at least one dimension. All dimensions except the first must match across ranks.
        splits: Number of rows to send to each rank. The sum may be less than the number of rows. By default,
            all ranks receive equal shares. Not supported within ``jit``.
        name: Key that matches the ranks' calls.
        process_set: The participating ranks.

    Returns:
        The received rows. If ``splits`` is given, also the number of rows from each rank (int32).
    """
    if splits is not None and is_traced((splits,)):
        raise ArgumentError(_NO_SPLITS)
    cut = None if splits is None else tuple(np.asarray(splits).tolist())
    output, received = _run(movement(Collective.ALLTOALL, name, process_set), [array], cut)
    return output if splits is None else (output, received)


def reducescatter(
    array: Any, name: str | None = None, op: int | None = None,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:
    """Reduce ``array`` over all ranks (Average or Sum), and return this rank's share of the rows.

    With d rows and n ranks, each rank gets d // n rows, and the first d % n ranks get one more.
    """
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set)
    return _run(call, [array])[0]


def grouped_reducescatter(
    arrays: Values, name: str | None = None, op: int | None = None,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several arrays in one exchange. See ``reducescatter``."""
    call = reducescatter_call(name, None, op, prescale_factor, postscale_factor, process_set, True)
    return _run(call, arrays)


def join() -> int:
    """Contribute zeros to other ranks' reductions until all ranks have joined.

    Returns:
        The global rank that joined last. All ranks get the same result.
    """
    settle()
    return collectives.join(session.engine())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of the set have called this function."""
    settle()
    collectives.barrier(session.engine(), set_id(process_set))
