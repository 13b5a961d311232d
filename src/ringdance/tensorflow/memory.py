"""TensorFlow's eager tensors as NumPy views, and arrays as tensors, without copying where possible."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from ringdance.core.exchange import aligned_empty

__all__ = ["tensor_of", "view_of"]

Array = np.ndarray[Any, Any]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def view_of(tensor: Any) -> Array:
    """Return a contiguous NumPy view of an eager tensor; a copy only of what is not in the host's memory."""
    try:
        array = tensor._numpy()
    except AttributeError:  # not documented, so it may go; this one copies
        array = tensor.numpy()
    return array if isinstance(array, np.ndarray) else np.asarray(array)


def tensor_of(array: Array) -> Any:
    """Return an eager tensor that shares the memory of an array which nobody writes to any more.

    TensorFlow needs memory aligned to 64 bytes, as the engine's own is; other memory is copied.
    """
    if array.ctypes.data % 64 and array.size:
        aligned = aligned_empty(array.shape, array.dtype)
        aligned[...] = array
        array = aligned
    if array.dtype == _BFLOAT16:  # DLPack's makers do not know it: the same bits under another name
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
