"""Convert between MXNet's arrays and NumPy views, without copying where that is possible.

MXNet computes in the background: an operation returns an array at once, and a thread fills it later. A view
of an array's memory is made after what writes to it is done, and one that is written to after what reads it
is done too. Whatever MXNet starts afterwards sees what was written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from ringdance.errors import ArgumentError
from ringdance.training.gradients.compression import Compressor, compression_for
from ringdance.training.gradients.weights import rows_of, step_of
from ringdance.training.memory import array_at

Array = np.ndarray[Any, Any]
NDArray = Any  # mx.nd.NDArray, of which mx.np.ndarray is a subclass


def _floating_dtype(tensor: NDArray) -> Any:
    return tensor.dtype if np.dtype(tensor.dtype).kind == "f" else None


class Compression:
    """The compressions: MXNet's operators have no bfloat16 on hosts."""

    _all = compression_for(__name__, np.float16, None, _floating_dtype, lambda one, kind: one.astype(kind))
    none: type[Compressor] = _all.none
    fp16: type[Compressor] = _all.fp16


def on_host(tensor: NDArray) -> bool:
    """Return whether an array lies in host memory."""
    return str(tensor.ctx.device_type).startswith("cpu")


def array_of(tensor: NDArray, written: bool = False) -> Array:
    """Return the values of an array: a view in host memory, else a copy.

    Args:
        tensor: is complete on return.
        written: whether the view will be written to; then nothing reads the array any more.

    Raises:
        ArgumentError: not an array, or a sparse one.
        MXNetError: what computes it has failed.
    """
    if not isinstance(tensor, mx.nd.NDArray):
        raise ArgumentError(f"Expected an mx.nd.NDArray or an mx.np.ndarray, got {type(tensor).__name__}.")
    if tensor.stype != "default":
        raise ArgumentError(
            f"A {tensor.stype} array cannot be exchanged: use tostype('default'), and for gradients of an "
            "embedding sparse_grad=False."
        )
    if not on_host(tensor):
        return tensor.asnumpy()
    check_call((_LIB.MXNDArrayWaitToWrite if written else _LIB.MXNDArrayWaitToRead)(tensor.handle))
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(address)))
    return array_at(address.value or 0, tensor.shape, np.dtype(tensor.dtype), tensor)


def empty(shape: tuple[int, ...], dtype: Any, like: NDArray) -> NDArray:
    """Return a new array on the device of ``like`` and of its class."""
    if all(shape) and shape:
        made = mx.nd.empty(shape, like.ctx, dtype)
    else:
        with mx.util.np_shape(True):  # whose first use is logged, so only where these are not unknown lengths
            made = mx.nd.empty(shape, like.ctx, dtype)
    return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made


def write(array: Array, tensor: NDArray) -> None:
    """Copy values to an array of the same shape, whatever its device."""
    if on_host(tensor):
        array_of(tensor, written=True)[...] = array
    else:
        tensor[()] = array  # MXNet knows neither [:] nor [...] for an mx.np array without dimensions


def from_array(array: Array, like: NDArray) -> NDArray:
    """Return values as an array on the device of ``like`` and of its class."""
    made = empty(array.shape, array.dtype, like)
    if array.size:
        write(array, made)
    return made


def sample_of(tensors: Sequence[NDArray]) -> Array:
    """Return a sample of the elements: see ``weights``."""

    def take(one: NDArray) -> tuple[int, Array]:
        if _floating_dtype(one) is None:
            raise TypeError("only floats are compared")
        flat = array_of(one).reshape(-1)
        return flat.size, flat[:: step_of(flat.size)].astype(np.float32)

    return np.concatenate([np.empty(0, np.float32), *rows_of(tensors, take)])
