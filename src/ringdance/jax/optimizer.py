"""An optax transformation whose gradients are reduced over the ranks first."""

from __future__ import annotations

import functools
import itertools
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringdance import session
from ringdance.errors import ArgumentError
from ringdance.jax.memory import Compression
from ringdance.jax.operations import compare_weights, grouped_allreduce, reduce_gradients
from ringdance.training.checks import pick_operation
from ringdance.training.exports import Average
from ringdance.training.gradients.options import check_passes, pattern_of, scales_of
from ringdance.training.process_sets import ProcessSet, global_process_set, takes_part

_ADVICE = "params, state = hvd.broadcast_parameters((params, state), root_rank=0)"
_numbers = itertools.count()  # all ranks make their transformations in one order


class DistributedState(NamedTuple):
    """State of ``distributed`` with several passes: of the inner transformation, and what is summed."""

    inner: Any
    passes: jax.Array  # since the last exchange, int32
    gradients: Any  # this rank's sums of these passes, at least float32


def _cast(tree: Any, like: Any) -> Any:
    """Return arrays in the types of others; random keys as they are."""
    same = lambda one, other: one if one.dtype == other.dtype else one.astype(other.dtype)  # noqa: E731
    return jax.tree.map(same, tree, like)


def _name_of(path: Any) -> str:
    """Return a leaf's path as text: dense/bias."""
    return str(jax.tree_util.keystr(path, simple=True, separator="/"))


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def mean_of(tree: Any, name: str, process_set: ProcessSet) -> Any:
    """Return a tree of arrays as the mean over the ranks, exchanged together."""
    leaves, structure = jax.tree.flatten(tree)
    done = grouped_allreduce(leaves, name, process_set=process_set) if leaves else leaves
    return jax.tree.unflatten(structure, done)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_mean_gradient(tree: Any, name: str, process_set: ProcessSet) -> Any:
    """Return what is given; its gradient becomes the mean of the ranks' gradients."""
    return tree


_with_mean_gradient.defvjp(
    lambda tree, *_: (tree, None),
    lambda name, process_set, _, gradient: (mean_of(gradient, name, process_set),),
)


def _of_all_ranks(name: str, key: str, given: Any, process_set: ProcessSet) -> Any:
    """Return an extra argument of ``update``; what optax computes by it is the mean over the ranks."""
    mean = functools.partial(mean_of, name=f"{name}.{key}", process_set=process_set)
    if key in ("value", "grad"):
        return mean(given)
    if not callable(given) or key not in ("value_fn", "grad_fn"):
        return given

    @functools.wraps(given)  # optax passes the arguments that are in its signature
    def everywhere(params: Any, *args: Any, **kwargs: Any) -> Any:
        if key == "value_fn":
            params = _with_mean_gradient(params, f"{name}.{key}.gradient", process_set)
        return mean(given(params, *args, **kwargs))

    return everywhere


def _check_caller() -> None:
    """Raise ArgumentError within ``optax.apply_if_finite``: a rank with a NaN would skip the exchange."""
    callers = [frame.f_code.co_qualname for frame, _ in traceback.walk_stack(None)]
    if session.engine().size > 1 and any(name.startswith("apply_if_finite.") for name in callers):
        raise ArgumentError(
            "optax.apply_if_finite(hvd.distributed(tx)) looks at the gradients of this rank: where they "
            "are not finite it leaves out the exchange, for which the others wait. Write "
            "hvd.distributed(optax.apply_if_finite(tx, ...)): there all ranks look at the reduced gradients."
        )


def distributed(
    tx: Any, *, op: int = Average, compression: Any = Compression.none, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optax transformation that reduces gradients over the ranks and passes them to ``tx``.

    All leaves go in one exchange. What ``tx`` does (clipping, weight decay) sees reduced gradients, and the
    means of the ranks' ``value``, ``grad``, ``value_fn`` and ``grad_fn`` where ``update`` is given them, as
    for ``optax.contrib.reduce_on_plateau`` and line searches. Works within ``jit`` and outside.

    Args:
        tx: an ``optax.GradientTransformation``.
        op: Average or Sum.
        compression: ``Compression.fp16`` or ``.bf16`` halve the bytes of float32 gradients.
        backward_passes_per_step: gradients of so many calls are summed locally before they are exchanged;
            the calls between give updates of zero, and are no places for a checkpoint: see
            ``broadcast_parameters``.
        average_aggregated_gradients: divides that sum by their number.
        gradient_predivide_factor: with Average, divides before and multiplies after the sum.
        process_set: the ranks that take part; on others the transformation is local.

    Raises:
        ArgumentError: an argument is wrong; from ``update`` where several ranks take part: it is called by
            ``optax.apply_if_finite``, which belongs within: ``distributed(optax.apply_if_finite(tx, 3))``.
    """
    import optax

    operation = int(pick_operation(None, op))
    prescale, postscale = scales_of(pick_operation(None, op), gradient_predivide_factor)
    passes = backward_passes_per_step
    check_passes(passes)
    share = 1.0 / passes if average_aggregated_gradients else 1.0
    name = f"distributed.{next(_numbers)}"
    inner = optax.with_extra_args_support(tx)

    def reduced(gradients: Any) -> Any:
        paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in paths]
        every = jax.tree.leaves(gradients, is_leaf=lambda one: one is None)
        pattern = pattern_of(["none" if one is None else "dense" for one in every])
        if not leaves or not takes_part(process_set):
            return gradients if share == 1.0 else jax.tree.map(lambda one: one * share, gradients)
        _check_caller()
        scales = prescale, postscale * share
        names = [_name_of(path) for path, _ in paths]
        done = reduce_gradients(leaves, name, operation, *scales, process_set, pattern, compression, names)
        return jax.tree.unflatten(structure, done)

    def step(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        if not takes_part(process_set):
            return inner.update(reduced(gradients), state, params, **extra)
        extra = {key: _of_all_ranks(name, key, one, process_set) for key, one in extra.items()}
        mean = reduced(gradients)
        trained = _by_path(gradients)  # what has no gradient may be each rank's own
        if found := {path: one for path, one in _by_path(params).items() if path in trained}:
            compare_weights([*found.values()], [*found], name, _ADVICE, process_set)
        return inner.update(mean, state, params, **extra)

    def init(params: Any) -> Any:
        state = inner.init(params)
        if passes == 1:
            return state
        # At least float32: 16-bit floats are summed in that.
        sums = jax.tree.map(lambda one: jnp.zeros_like(one) + jnp.float32(0), params)
        return DistributedState(state, jnp.zeros((), jnp.int32), sums)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if passes == 1:
            return step(gradients, state, params, extra)
        total = _cast(jax.tree.map(jnp.add, state.gradients, gradients), state.gradients)

        def exchange(total: Any, state: Any) -> Any:
            return step(_cast(total, gradients), state, params, extra)

        def wait(total: Any, state: Any) -> Any:
            updates, after = jax.eval_shape(exchange, total, state)  # may have wider types than the state
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), updates), _cast(state, after)

        last = state.passes + 1 == passes
        updates, after = jax.lax.cond(last, exchange, wait, total, state.inner)
        sums = jax.tree.map(lambda one: jnp.where(last, 0, one), total)
        return updates, DistributedState(after, jnp.where(last, 0, state.passes + 1), sums)

    return optax.GradientTransformationExtraArgs(init, update)
