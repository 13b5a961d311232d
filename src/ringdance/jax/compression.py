"""Compression of gradients for the exchange: casts to 16 bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ringdance.training.compression import compression_for

__all__ = ["Compression"]


def _floating_dtype(tensor: Any) -> Any:
    """Return the tensor's data type if it is floating, else None."""
    return tensor.dtype if jnp.issubdtype(tensor.dtype, jnp.floating) else None


Compression = compression_for(
    __name__, jnp.float16, jnp.bfloat16, _floating_dtype, lambda tensor, dtype: tensor.astype(dtype)
)
