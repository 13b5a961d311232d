"""Compression of gradients for the exchange: casts to 16 bits."""

from __future__ import annotations

from typing import Any

from ringdance.keras.library import ops
from ringdance.training.compression import compression_for

__all__ = ["Compression"]


def _floating_dtype(tensor: Any) -> Any:
    """Return the tensor's data type if it is floating, else None."""
    dtype = ops.dtype_name(tensor.dtype) if ops.is_tensor(tensor) else ""
    return dtype if "float" in dtype else None


Compression = compression_for(
    __name__, "float16", "bfloat16", _floating_dtype, lambda tensor, dtype: ops.cast(tensor, dtype)
)
