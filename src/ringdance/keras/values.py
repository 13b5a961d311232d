"""The collectives on what Keras converts to tensors of its backend, run at once."""

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
    """Reduce a tensor, array or number over all ranks; return a tensor of the backend.

    Args:
        value: equal shape and type on all ranks.
        name: key that matches the ranks' calls.
        average: deprecated form of ``op``: True is Average, False is Sum.
        prescale_factor: multiplies the input of each rank.
        postscale_factor: multiplies the result.
        op: Average (default), Sum, Min, Max or Product.
        compression: ``Compression.none``, ``.fp16`` or ``.bf16``.

    Raises:
        ArgumentError: an argument is wrong.
        MismatchError: ranks called it with different shapes, types or operations; raised on all.
    """
    operation = pick_operation(average, op)
    small, context = compression.compress(ops.convert_to_tensor(value))
    done = binding().allreduce(
        small, name=name, op=int(operation), prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return compression.decompress(done, context)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the ranks' tensors joined along dimension 0, which may differ between ranks."""
    return binding().allgather(ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor of global rank ``root_rank``; shape and type equal on all ranks."""
    return binding().broadcast(ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce (Average or Sum) and return this rank's rows."""
    return binding().reducescatter(ops.convert_to_tensor(value), name=name, op=op)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite variables with those of global rank ``root_rank``: ``model.variables``, an optimizer's.

    Seeds of random generators stay each rank's own, and sums of gradients between the passes of a step too.
    A rank without any takes the root's, as after a checkpoint that rank 0 alone has loaded.

    Args:
        variables: Keras variables, of equal shapes and types and in the same order on all ranks.
        root_rank: global rank.
        process_set: the ranks that take part.
    """
    engine = session.engine()
    chosen = [one for one in variables if not is_random_state(one)]
    if not chosen or len(engine.members(set_id(process_set))) == 1:
        return
    arrays = tuple([read(one) for one in chosen])
    pairs = list(zip(chosen, arrays, strict=True))
    if any(array.any() for one, array in pairs if is_gradient_sum(one)):
        pairs = [(one, array) for one, array in pairs if not is_gradient_sum(one)]
    call = movement(Collective.BROADCAST, "broadcast_variables", process_set, True, root_rank)
    call.submit(engine, arrays, arrays).wait()
    if engine.rank != root_rank:
        for one, array in pairs:
            one.assign(array)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras has no list of all variables.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "broadcast_global_variables() belongs to TensorFlow 1's graphs. Use broadcast_variables("
        f"model.variables, root_rank={root_rank}), or BroadcastGlobalVariablesCallback({root_rank}) in fit()."
    )

