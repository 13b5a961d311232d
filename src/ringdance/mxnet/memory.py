"""Convert between MXNet arrays and NumPy views, without copying if possible.

MXNet computes asynchronously: an operation returns an array immediately, and a thread fills the array later.
A view for reading is created after all pending writes to the array are complete, and a view for writing after
all pending reads are also complete. Operations that MXNet starts later see the new values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ringdance.errors import ArgumentError
from ringdance.training.collectives import array_at
from ringdance.training.gradients.compression import Compressor, compression_for
from ringdance.training.gradients.weights import rows_of, step_of

Array = np.ndarray[Any, Any]
NDArray = Any  # mx.nd.NDArray, or its subclass mx.np.ndarray


def _floating_dtype(tensor: NDArray) -> Any:
    return tensor.dtype if np.dtype(tensor.dtype).kind == "f" else None


class Compression:
    """Compression algorithms, except bf16, which MXNet's operators do not support on CPUs."""

    _all = compression_for(__name__, np.float16, None, _floating_dtype, lambda one, kind: one.astype(kind))
    none: type[Compressor] = _all.none
    fp16: type[Compressor] = _all.fp16


def on_host(tensor: NDArray) -> bool:
    """Return True if an array is in host memory."""
    return str(tensor.ctx.device_type).startswith("cpu")


def array_of(tensor: NDArray, written: bool = False) -> Array:
    """Return the values of an array: a view if it is in host memory, otherwise a copy.

    Args:
        tensor: The array. All pending writes to it are complete on return.
        written: If True, the view is for writing, and all pending reads are also complete on return.

    Raises:
        ArgumentError: The value is not an array, or it is a sparse array.
        MXNetError: The operation that computes the array has failed.
    """
    if not isinstance(tensor, mx.nd.NDArray):
        raise ArgumentError(f"Expected an mx.nd.NDArray or mx.np.ndarray, but got {type(tensor).__name__}.")
    if tensor.stype != "default":
        raise ArgumentError(
            f"An array of storage type '{tensor.stype}' cannot be exchanged. Convert it with "
            "tostype('default'). For the gradients of an embedding, use sparse_grad=False."
        )
    if not on_host(tensor):
        return tensor.asnumpy()
    check_call((_LIB.MXNDArrayWaitToWrite if written else _LIB.MXNDArrayWaitToRead)(tensor.handle))
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(address)))
    return array_at(address.value or 0, tensor.shape, np.dtype(tensor.dtype), tensor)


def empty(shape: tuple[int, ...], dtype: Any, like: NDArray) -> NDArray:
    """Return a new, uninitialized array of the same class and on the same device as ``like``."""
    if all(shape) and shape:
        result = mx.nd.empty(shape, like.ctx, dtype)
    else:
        # Without np_shape, MXNet would treat the shapes of scalars and empty arrays as unknown. For other
        # arrays, np_shape is not used, because MXNet logs a message at its first use.
        with mx.util.np_shape(True):
            result = mx.nd.empty(shape, like.ctx, dtype)
    return result.as_np_ndarray() if isinstance(like, mx.np.ndarray) else result


def write(array: Array, tensor: NDArray) -> None:
    """Copy values to an array of the same shape on any device."""
    if on_host(tensor):
        array_of(tensor, written=True)[...] = array
    else:
        tensor[()] = array  # MXNet supports neither [:] nor [...] for a zero-dimensional mx.np array.


def from_array(array: Array, like: NDArray) -> NDArray:
    """Return an MXNet array with the given values, of the same class and on the same device as ``like``."""
    result = empty(array.shape, array.dtype, like)
    if array.size:
        write(array, result)
    return result


def sample_of(tensors: Sequence[NDArray]) -> Array:
    """Return a sample of the arrays' elements to compare across ranks.

    See ``training.gradients.weights``.
    """

    def take(one: NDArray) -> tuple[int, Array]:
        if _floating_dtype(one) is None:
            raise TypeError("Only floating-point arrays can be compared.")
        flat = array_of(one).reshape(-1)
        return flat.size, flat[:: step_of(flat.size)].astype(np.float32)

    return np.concatenate([np.empty(0, np.float32), *rows_of(tensors, take)])
