"""Collectives that run immediately, on any value that Keras can convert to a tensor of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringdance.core.request import Collective
from ringdance.keras.library import Compression, ops, read
from ringdance.keras.reduction import binding
from ringdance.training import session
from ringdance.training.checks import is_gradient_sum, is_random_state, pick_operation
from ringdance.training.collectives import movement
from ringdance.training.exports import Average, Sum
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = [
    "Average", "Sum", "allgather", "allreduce", "broadcast", "broadcast_global_variables",
    "broadcast_variables", "reducescatter",
]


def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: Any = Compression.none,
) -> Any:
    """Reduce a tensor, array or number over all ranks. Returns a tensor of the backend.

    Args:
        value: Value with the same shape and dtype on all ranks.
        name: Key by which calls are matched across ranks.
        average: Deprecated: use ``op``. True means Average, False means Sum.
        prescale_factor: Factor applied to each rank's input.
        postscale_factor: Factor applied to the result.
        op: Average (default), Sum, Min, Max or Product.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``.

    Raises:
        ArgumentError: An argument is invalid.
        MismatchError: The ranks passed different shapes, dtypes or operations. Raised on all ranks.
    """
    operation = pick_operation(average, op)
    small, context = compression.compress(ops.convert_to_tensor(value))
    reduced = binding().allreduce(
        small, name=name, op=int(operation), prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return compression.decompress(reduced, context)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the ranks' tensors concatenated along dimension 0, whose length may differ between ranks."""
    return binding().allgather(ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor of global rank ``root_rank``. Shapes and dtypes must match on all ranks."""
    return binding().broadcast(ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce ``value`` over all ranks (Average or Sum), and return this rank's share of the rows."""
    return binding().reducescatter(ops.convert_to_tensor(value), name=name, op=op)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite ``model.variables`` or an optimizer's variables with the values of global rank ``root_rank``.

    Each rank keeps its own random seeds. Between the passes of a step, it also keeps its own gradient sums,
    unless they are all zero. In that case, for example if only rank 0 has loaded a checkpoint, it takes the
    root's sums.

    Args:
        variables: Keras variables with the same shapes and dtypes, in the same order on all ranks.
        root_rank: Global rank of the root.
        process_set: The participating ranks.
    """
    engine = session.engine()
    chosen = [variable for variable in variables if not is_random_state(variable)]
    if not chosen or len(engine.members(set_id(process_set))) == 1:
        return
    arrays = tuple([read(variable) for variable in chosen])
    pairs = list(zip(chosen, arrays, strict=True))
    if any(array.any() for variable, array in pairs if is_gradient_sum(variable)):
        pairs = [(variable, array) for variable, array in pairs if not is_gradient_sum(variable)]
    call = movement(Collective.BROADCAST, "broadcast_variables", process_set, True, root_rank)
    call.submit(engine, arrays, arrays).wait()
    if engine.rank != root_rank:
        for variable, array in pairs:
            variable.assign(array)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError, because Keras has no list of all variables.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "broadcast_global_variables() works only in TensorFlow 1 graphs. Use broadcast_variables("
        f"model.variables, root_rank={root_rank}), or BroadcastGlobalVariablesCallback({root_rank}) in fit()."
    )

