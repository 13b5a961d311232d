"""Broadcast the leaves of a pytree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringdance import session
from ringdance.jax.operations import grouped_broadcast
from ringdance.training.objects import broadcast_object
from ringdance.training.process_sets import ProcessSet, global_process_set

__all__ = ["broadcast_parameters"]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


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
    """
    leaves, structure = jax.tree.flatten(params)
    if session.engine().size == 1 or not leaves:
        return params
    arrays = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
    keys = {
        index: jax.random.key_impl(leaves[index]) for index in arrays
        if jax.dtypes.issubdtype(leaves[index].dtype, jax.dtypes.prng_key)
    }
    if arrays:
        sent = [jax.random.key_data(leaves[index]) if index in keys else leaves[index] for index in arrays]
        received = grouped_broadcast(sent, root_rank, "broadcast_parameters", process_set)
        for index, leaf in zip(arrays, received, strict=True):
            leaves[index] = jax.random.wrap_key_data(leaf, impl=keys[index]) if index in keys else leaf
    others = [index for index, leaf in enumerate(leaves) if not _is_array(leaf)]
    if others:
        objects = broadcast_object(
            [leaves[index] for index in others], root_rank, "broadcast_parameters.others", process_set
        )
        for index, leaf in zip(others, objects, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)
