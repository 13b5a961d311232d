"""Convert between JAX arrays and NumPy views, without copying if possible.

Unless ``jax_enable_x64`` is set, JAX has no 64-bit types and truncates 64-bit inputs to 32 bits. 64-bit NumPy
values therefore stay NumPy arrays, both as arguments and as results.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

from ringdance.errors import ArgumentError
from ringdance.training.collectives import array_at
from ringdance.training.gradients.compression import compression_for

Array = np.ndarray[Any, Any]


def exact(value: Any) -> Any:
    """Return a value as a JAX array, or as a NumPy array if JAX would truncate it to 32 bits."""
    if isinstance(value, (np.ndarray, np.generic)) and _is_cut(value.dtype):
        return np.asarray(value)
    return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)


def _is_cut(dtype: Any) -> bool:
    return dtype.kind in "iufc" and jax.dtypes.canonicalize_dtype(dtype) != dtype


def array_of(value: Any) -> Array:
    """Return a contiguous NumPy array of the values: a view if possible, otherwise a copy.

    Do not write to the view. It is marked as writable only because MPI rejects read-only memory.

    Raises:
        ArgumentError: The array is sharded across devices of several processes.
    """
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise ArgumentError(
            "The array is sharded across several processes and cannot be exchanged. Pass an array whose "
            "devices all belong to this process."
        )
    view = np.asarray(value)
    if not view.flags.c_contiguous:
        return view.copy()
    if view.flags.writeable:
        return view
    return array_at(view.__array_interface__["data"][0], view.shape, view.dtype, view)


def from_array(array: Array, like: Any = None) -> Any:
    """Return an engine array as a JAX array on the device of ``like``, or unchanged if JAX would truncate it.

    On the CPU, the result shares the array's memory if the memory is aligned to 64 bytes, as it is in engine
    arrays. If the rows cannot be divided evenly among the devices of ``like``, the result is on the default
    device. If ``like`` is not committed to its device, neither is the result, so that programs on several
    devices can use it.
    """
    if _is_cut(array.dtype):
        return array
    sharding = like.sharding if isinstance(like, jax.Array) and like.committed else None
    try:
        return jax.device_put(array, sharding, may_alias=True)
    except ValueError:  # The rows cannot be divided evenly among the devices.
        return jax.device_put(array, may_alias=True)


def _floating_dtype(array: Any) -> Any:
    """Return the array's dtype in JAX if it is a floating-point dtype, otherwise None."""
    floating = jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
    return jax.dtypes.canonicalize_dtype(array.dtype) if floating else None


Compression = compression_for(
    __name__, np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), _floating_dtype, jax.numpy.astype
)
