"""JAX arrays as NumPy views, and back, without copying where that is possible."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ringdance.errors import ArgumentError

__all__ = ["array_of", "at_address", "from_array"]

Array = np.ndarray[Any, Any]


class _Lent:
    """Memory as NumPy's array interface describes it, writable; keeps its owner alive."""

    def __init__(self, address: int, count: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False), "shape": (count,), "typestr": "|u1", "version": 3,
        }


def at_address(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any = None) -> Array:
    """Return a writable array over this memory."""
    count = dtype.itemsize
    for length in shape:
        count *= length
    if not count:
        return np.empty(shape, dtype)
    return np.asarray(_Lent(address, count, owner)).view(dtype).reshape(shape)


def array_of(value: Any) -> Array:
    """Return the values of an array; a view if it lies on the CPU, a copy if on an accelerator.

    The view is for reading; it is marked as writable only because MPI refuses other memory.

    Raises:
        ArgumentError: it is spread over the devices of several processes.
    """
    if not isinstance(value, jax.Array):
        value = jax.numpy.asarray(value)
    if not value.is_fully_addressable:
        raise ArgumentError(
            "An array that is spread over several processes cannot be exchanged: give each rank its own."
        )
    view = np.asarray(value)
    if not view.flags.c_contiguous:
        return view.copy()
    if view.flags.writeable:
        return view
    return at_address(view.__array_interface__["data"][0], view.shape, view.dtype, view)


def from_array(array: Array, like: Any = None) -> jax.Array:
    """Return an array that the engine has made as a JAX array where ``like`` lies.

    On the CPU it shares the memory if that is aligned to 64 bytes, as the engine's is.
    """
    place = like.sharding if isinstance(like, jax.Array) else None
    return jax.device_put(array, place, may_alias=True)
