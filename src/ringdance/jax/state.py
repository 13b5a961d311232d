"""Broadcast the leaves of a pytree."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringdance import session
from ringdance.errors import ArgumentError
from ringdance.jax.operations import grouped_broadcast
from ringdance.jax.optimizer import DistributedState, mean_of
from ringdance.training.objects import allgather_json, broadcast_object
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _has_sums(node: Any) -> bool:
    if isinstance(node, DistributedState):
        return np.ndim(node.passes) == 0  # otherwise several models' sums in one, as by jax.vmap
    return type(node).__name__ == "MultiStepsState" and np.ndim(node.mini_step) == 0


def _mark_of(node: Any) -> tuple[int, int]:
    """Return the passes in a node's sums, and whose gradients they are: see ``DistributedState.owner``."""
    if isinstance(node, DistributedState):
        return int(node.passes), int(node.owner)
    # MultiSteps does not say whose they are: if all ranks are in the same pass, each has its own.
    return int(node.mini_step), session.engine().rank if node.mini_step else -1


def _with_means(tree: Any, root_rank: int, name: str, process_set: ProcessSet) -> Any:
    """Return a tree in which sums of gradients that are each rank's own are the mean over the ranks."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=_has_sums)
    places = [place for place, node in enumerate(nodes) if _has_sums(node)]
    members = session.engine().members(set_id(process_set))
    every = allgather_json([_mark_of(nodes[place]) for place in places], name, process_set) if places else []
    for number, place in enumerate(places):
        node, (passes, owner) = nodes[place], every[members.index(root_rank)][number]
        mean = partial(mean_of, name=f"{name}.{number}", process_set=process_set)
        each_its_own = [marks[number] for marks in every] == [[passes, rank] for rank in members]
        if each_its_own and isinstance(node, DistributedState):
            nodes[place] = node._replace(gradients=mean(node.gradients), owner=jnp.full_like(node.owner, -1))
        elif each_its_own:
            nodes[place] = node._replace(acc_grads=mean(node.acc_grads))
        elif owner >= 0 and isinstance(node, DistributedState):
            others = [marks[number] for marks in every]
            raise ArgumentError(
                f"broadcast_parameters: the state of rank {root_rank} is after {passes} passes of a step, "
                f"with sums of rank {owner}'s gradients only, and the other ranks do not have theirs of the "
                f"same passes (passes and owner by rank: {others}), as after loading one's checkpoint or "
                "in different passes. Save what hvd.broadcast_parameters((params, state)) returns, with the "
                "mean of all, or after the exchange. To drop them: "
                "tx.init(params)._replace(inner=state.inner)."
            )
    return jax.tree.unflatten(structure, nodes)


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return ``params`` with the leaves of global rank ``root_rank``: parameters, optimizer state, anything.

    Arrays, random keys included, go in one exchange; other leaves (numbers, strings) as an object. NumPy
    arrays of types that JAX does not have enabled (64 bits) stay NumPy arrays. Sums of gradients between the
    passes of a step, of ``distributed`` and ``optax.MultiSteps``, become the mean of all ranks' sums.

    Args:
        params: a pytree of equal structure, shapes and types on all ranks; it is not changed.
        root_rank: global rank.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: the root has sums of one rank that stand for no other; on all ranks.
    """
    leaves, structure = jax.tree.flatten(params)
    if session.engine().size == 1 or not leaves:
        return params
    name = "broadcast_parameters"
    leaves = jax.tree.leaves(_with_means(params, root_rank, f"{name}.sums", process_set))
    arrays = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves if _is_array(leaf)]
    others = [leaf for leaf in leaves if not _is_array(leaf)]
    received = iter(grouped_broadcast(arrays, root_rank, name, process_set) if arrays else ())
    objects = iter(broadcast_object(others, root_rank, f"{name}.others", process_set) if others else ())
    for index, leaf in enumerate(leaves):
        leaves[index] = next(received if _is_array(leaf) else objects)
        if _is_key(leaf):
            leaves[index] = jax.random.wrap_key_data(leaves[index], impl=jax.random.key_impl(leaf))
    return jax.tree.unflatten(structure, leaves)
