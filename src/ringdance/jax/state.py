"""Broadcast the leaves of a pytree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringdance.jax.operations import grouped_broadcast
from ringdance.training import session
from ringdance.training.objects import broadcast_object
from ringdance.training.process_sets import ProcessSet, global_process_set


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return ``params`` with all leaves replaced by those on global rank ``root_rank``.

    Arrays, including random keys, are broadcast in one exchange. Other leaves (numbers, strings) are
    broadcast as an object. NumPy arrays of 64-bit types stay NumPy arrays if these types are disabled in JAX.

    Args:
        params: A pytree, for example of parameters and optimizer state, with the same structure, shapes and
            dtypes on all ranks. It is not changed.
        root_rank: Global rank of the root.
        process_set: The participating ranks.
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
    return jax.tree.unflatten(structure, leaves)
