"""Broadcast the leaves of a pytree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringdance import session
from ringdance.errors import ArgumentError
from ringdance.jax.operations import grouped_broadcast
from ringdance.jax.optimizer import DistributedState
from ringdance.training.objects import broadcast_object
from ringdance.training.process_sets import ProcessSet, global_process_set


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _passes_of(node: Any) -> Any:
    """Return how many passes of a step a state has summed; None for what is not such a state."""
    if isinstance(node, DistributedState):
        return node.passes
    return node.mini_step if type(node).__name__ == "MultiStepsState" else None  # of optax


def _check_sums(tree: Any, root_rank: int) -> None:
    """Raise ArgumentError for a state in the middle of a step: its sums are those of one rank's gradients."""
    for node in jax.tree.leaves(tree, is_leaf=lambda one: _passes_of(one) is not None):
        passes = _passes_of(node)
        if passes is not None and np.any(np.asarray(passes)):
            raise ArgumentError(
                f"broadcast_parameters: the state of rank {root_rank} is after {passes} passes of a step, with "
                "sums of one rank's gradients. Save and broadcast it after the last pass of a step. To drop "
                "the sums in a state of hvd.distributed: tx.init(params)._replace(inner=state.inner)."
            )


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return ``params`` with the leaves of global rank ``root_rank``: parameters, optimizer state, anything.

    Arrays, random keys included, go in one exchange; other leaves (numbers, strings) as an object. NumPy
    arrays of types that JAX does not have enabled (64 bits) stay NumPy arrays.

    Args:
        params: a pytree of equal structure, shapes and types on all ranks; it is not changed.
        root_rank: global rank.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root's state of ``distributed`` or ``optax.MultiSteps`` is between the passes of a
            step, so that it has sums of one rank's gradients; on all ranks.
    """
    leaves, structure = jax.tree.flatten(params)
    if session.engine().size == 1 or not leaves:
        return params
    name = "broadcast_parameters"
    arrays = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves if _is_array(leaf)]
    others = [leaf for leaf in leaves if not _is_array(leaf)]
    received = iter(grouped_broadcast(arrays, root_rank, name, process_set) if arrays else ())
    objects = iter(broadcast_object(others, root_rank, f"{name}.others", process_set) if others else ())
    for index, leaf in enumerate(leaves):
        leaves[index] = next(received if _is_array(leaf) else objects)
        if _is_key(leaf):
            leaves[index] = jax.random.wrap_key_data(leaves[index], impl=jax.random.key_impl(leaf))
    result = jax.tree.unflatten(structure, leaves)
    _check_sums(result, root_rank)
    return result
