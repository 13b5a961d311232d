"""Exchange Python objects with cloudpickle. Unpickling can run any code, so ranks must trust each other.

Ringdance exchanges its own data as JSON instead.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from ringdance.core.request import Collective
from ringdance.errors import CollectiveError
from ringdance.training import session
from ringdance.training.collectives import Call
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id

__all__ = ["allgather_object", "broadcast_object"]


def _pack(obj: Any, dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> np.ndarray[Any, Any]:
    # A bytearray, because bytes are read-only, and MPI bindings refuse read-only buffers even for sending.
    return np.frombuffer(bytearray(dumps(obj)), np.uint8)


class ObjectError(CollectiveError):
    """An object could not be pickled on another rank. The engine stays usable."""


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every member. The root gets its own object back, not a copy.

    Args:
        obj: Any object that cloudpickle can pickle. Ignored on ranks other than the root.
        root_rank: Global rank of the root.
        name: Key that matches the ranks' calls. The operations are named ``<name>.sz`` and ``<name>.t``.
        process_set: The participating ranks.
    """
    engine = session.engine()
    number = set_id(process_set)
    name = name or "broadcast_object"  # Omits the object's type, which may differ between ranks.
    if engine.size == 1:
        return obj
    is_root = engine.rank == root_rank
    # If the object cannot be pickled, the root tells the other ranks before it raises the error.
    data, error = np.empty(0, np.uint8), None
    if is_root:
        try:
            data = _pack(obj)
        except Exception as problem:
            error = problem
    length = np.array([-1 if error else len(data)], np.int64)
    call = Call(Collective.BROADCAST, set_id=number, root=int(root_rank))
    call.but(name=f"{name}.sz").submit(engine, (length,), (length,)).wait()
    if error is not None:
        raise error
    if length[0] < 0:
        raise ObjectError(f"broadcast_object({name!r}): the object on rank {root_rank} cannot be pickled.")
    if not is_root:
        data = np.empty(int(length[0]), np.uint8)
    call.but(name=f"{name}.t").submit(engine, (data,), (data,)).wait()
    return obj if is_root else cloudpickle.loads(data.data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all members in rank order. Types and sizes may differ between ranks.

    The objects are pickled. As in ``broadcast_object``, unpickling can run any code.
    """
    return _allgather(obj, name or "allgather_object", process_set, cloudpickle.dumps, cloudpickle.loads)


def allgather_json(value: Any, name: str, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the values of all members in rank order. They are sent as JSON, so tuples become lists."""

    def dumps(value: Any) -> bytes:
        return json.dumps(value, default=operator.index).encode()  # ``default`` converts NumPy integers.

    return _allgather(value, name, process_set, dumps, lambda data: json.loads(bytes(data)))


def _allgather(
    obj: Any, name: str, process_set: ProcessSet, dumps: Callable[[Any], bytes],
    loads: Callable[[memoryview], Any],
) -> list[Any]:
    engine = session.engine()
    number = set_id(process_set)
    error: Exception | None = None
    try:
        data = _pack(obj, dumps)
    except Exception as problem:
        error, data = problem, _pack(None, dumps)
    lengths = np.array([-1 if error else len(data)], np.int64)
    sizes = Call(Collective.ALLGATHER, f"{name}.sz", set_id=number).submit(engine, (lengths,))
    bytes_ = Call(Collective.ALLGATHER, f"{name}.t", set_id=number).submit(engine, (data,))
    ends, (joined,) = sizes.wait()[0], bytes_.wait()
    if error is not None:
        raise error
    if (ends < 0).any():
        rank = engine.members(number)[int(np.argmin(ends))]
        raise ObjectError(f"allgather_object({name!r}): the object on rank {rank} cannot be pickled.")
    return [loads(part.data) for part in np.split(joined, np.cumsum(ends)[:-1])]
