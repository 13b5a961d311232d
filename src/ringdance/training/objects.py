"""Python objects between ranks, by cloudpickle. Only for jobs whose ranks trust each other, as all do."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from ringdance import session
from ringdance.errors import CollectiveError
from ringdance.training import verbs
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = ["allgather_object", "broadcast_object"]

# The default names do not depend on the object: types may differ between ranks.
_BROADCAST = "broadcast_object"
_ALLGATHER = "allgather_object"


def _pack(obj: Any) -> np.ndarray[Any, Any]:
    # A bytearray: the memory of bytes is read-only, which MPI bindings refuse even to send from.
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)


class ObjectError(CollectiveError):
    """An object could not be pickled on another rank; the engine stays usable."""


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every member; the root gets its own one back, not a copy.

    Args:
        obj: anything that cloudpickle takes; ignored on other ranks than the root.
        root_rank: global rank.
        name: key; the operations are ``<name>.sz`` and ``<name>.t``.
        process_set: who takes part.
    """
    engine = session.engine()
    number = set_id(process_set)
    name = name or _BROADCAST
    if engine.size == 1:
        return obj
    is_root = engine.rank == root_rank
    # An object that cannot be pickled raises on the root, but only after the others know.
    data, error = np.empty(0, np.uint8), None
    if is_root:
        try:
            data = _pack(obj)
        except Exception as problem:
            error = problem
    length = np.array([-1 if error else len(data)], np.int64)
    verbs.broadcast(
        engine, (length,), (length,), root_rank, name=f"{name}.sz", set_id=number, wake=False
    ).wait()
    if error is not None:
        raise error
    if length[0] < 0:
        raise ObjectError(f"broadcast_object({name!r}): the object on rank {root_rank} cannot be pickled.")
    if not is_root:
        data = np.empty(int(length[0]), np.uint8)
    verbs.broadcast(engine, (data,), (data,), root_rank, name=f"{name}.t", set_id=number, wake=False).wait()
    return obj if is_root else cloudpickle.loads(data.data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all members in rank order. Types and sizes may differ between ranks."""
    engine = session.engine()
    number = set_id(process_set)
    name = name or _ALLGATHER
    error: Exception | None = None
    try:
        data = _pack(obj)
    except Exception as problem:
        error, data = problem, _pack(None)
    if engine.size == 1:
        if error is not None:
            raise error
        return [cloudpickle.loads(data.data)]
    lengths = np.array([-1 if error else len(data)], np.int64)
    sizes = verbs.allgather(engine, (lengths,), name=f"{name}.sz", set_id=number, wake=False)
    bytes_ = verbs.allgather(engine, (data,), name=f"{name}.t", set_id=number, wake=False)
    ends, (joined,) = sizes.wait()[0], bytes_.wait()
    if error is not None:
        raise error
    if (ends < 0).any():
        rank = engine.members(number)[int(np.argmin(ends))]
        raise ObjectError(f"allgather_object({name!r}): the object on rank {rank} cannot be pickled.")
    pieces = np.split(joined, np.cumsum(ends)[:-1])
    return [cloudpickle.loads(piece.data) for piece in pieces]
