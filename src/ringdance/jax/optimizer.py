"""An optax transformation that reduces gradients over the ranks before another transformation uses them."""

from __future__ import annotations

import functools
import itertools
import traceback
from typing import Any

import jax

from ringdance.errors import ArgumentError
from ringdance.jax.memory import Compression
from ringdance.jax.operations import compare_weights, grouped_allreduce, reduce_gradients
from ringdance.training import session
from ringdance.training.checks import pick_operation
from ringdance.training.exports import Average
from ringdance.training.gradients.lists import pattern_of
from ringdance.training.process_sets import ProcessSet, global_process_set, takes_part

_ADVICE = "params, state = hvd.broadcast_parameters((params, state), root_rank=0)"
_numbers = itertools.count()  # Numbers for transformations, which all ranks must create in the same order.


def _name_of(path: Any) -> str:
    """Return a leaf's path as text, such as "dense/bias"."""
    return str(jax.tree_util.keystr(path, simple=True, separator="/"))


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def mean_of(tree: Any, name: str, process_set: ProcessSet) -> Any:
    """Return a tree of arrays averaged over the ranks, in one exchange."""
    leaves, structure = jax.tree.flatten(tree)
    means = grouped_allreduce(leaves, name, process_set=process_set) if leaves else leaves
    return jax.tree.unflatten(structure, means)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_mean_gradient(tree: Any, name: str, process_set: ProcessSet) -> Any:
    """Return ``tree`` unchanged. In the backward pass, its gradient is averaged over the ranks."""
    return tree


_with_mean_gradient.defvjp(
    lambda tree, *_: (tree, None),
    lambda name, process_set, _, gradient: (mean_of(gradient, name, process_set),),
)


def _of_all_ranks(name: str, key: str, given: Any, process_set: ProcessSet) -> Any:
    """Return the mean over the ranks of ``given``, the extra argument ``key`` of ``update``.

    If ``given`` is a loss or gradient function, the result is a function that averages its results. Other
    arguments are returned unchanged.
    """
    mean = functools.partial(mean_of, name=f"{name}.{key}", process_set=process_set)
    if key in ("value", "grad"):
        return mean(given)
    if not callable(given) or key not in ("value_fn", "grad_fn"):
        return given

    @functools.wraps(given)  # optax inspects the signature to choose arguments.
    def everywhere(params: Any, *args: Any, **kwargs: Any) -> Any:
        if key == "value_fn":
            params = _with_mean_gradient(params, f"{name}.{key}.gradient", process_set)
        return mean(given(params, *args, **kwargs))

    return everywhere


_REFUSED = ("apply_if_finite.", "MultiSteps.")


def _check_caller() -> None:
    """Raise ArgumentError if an optax wrapper that skips or sums gradients calls the transformation."""
    if session.engine().size == 1:
        return
    for frame, _ in traceback.walk_stack(None):
        name = frame.f_code.co_qualname
        if name.startswith(_REFUSED):
            outer = name.partition(".")[0]
            raise ArgumentError(
                f"optax.{outer}(hvd.distributed(tx), ...) sees only this rank's gradients and may skip "
                f"an exchange that other ranks wait for. Write hvd.distributed(optax.{outer}(tx, ...)), so "
                "that all ranks see the reduced gradients."
            )


def distributed(
    tx: Any, *, op: int = Average, compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optax transformation that reduces gradients over the ranks and passes them to ``tx``.

    All leaves are reduced in one exchange, and ``tx`` sees the reduced gradients. If ``update`` is called
    with ``value``, ``grad``, ``value_fn`` or ``grad_fn``, ``tx`` sees their means over the ranks, as needed
    by ``optax.contrib.reduce_on_plateau`` and line searches. Works both within ``jit`` and outside of it.

    Args:
        tx: An ``optax.GradientTransformation`` or ``optax.MultiSteps``.
        op: Average or Sum.
        compression: ``Compression.fp16`` or ``.bf16`` halves the number of bytes sent for float32 gradients.
        process_set: The participating ranks. On other ranks, gradients are not reduced.

    Raises:
        ArgumentError: An argument is invalid. With more than one rank, ``update`` also raises this error if
            ``optax.apply_if_finite`` or ``optax.MultiSteps`` calls it. Wrap these inside ``distributed``:
            ``distributed(optax.apply_if_finite(tx, 3))``.
    """
    import optax

    operation = int(pick_operation(None, op))
    name = f"distributed.{next(_numbers)}"
    inner = tx if isinstance(tx, optax.MultiSteps) else optax.with_extra_args_support(tx)

    def reduced(gradients: Any) -> Any:
        paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in paths]
        all_leaves = jax.tree.leaves(gradients, is_leaf=lambda leaf: leaf is None)
        pattern = pattern_of(["none" if leaf is None else "dense" for leaf in all_leaves])
        if not leaves:
            return gradients
        names = [_name_of(path) for path, _ in paths]
        out = reduce_gradients(leaves, name, operation, 1.0, 1.0, process_set, pattern, compression, names)
        return jax.tree.unflatten(structure, out)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if not takes_part(process_set):
            return inner.update(gradients, state, params, **extra)
        _check_caller()
        extra = {key: _of_all_ranks(name, key, value, process_set) for key, value in extra.items()}
        mean = reduced(gradients)
        trained = _by_path(gradients)  # Parameters without a gradient may differ between ranks.
        if compared := {path: leaf for path, leaf in _by_path(params).items() if path in trained}:
            compare_weights([*compared.values()], [*compared], name, _ADVICE, process_set)
        return inner.update(mean, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
