"""Gradient compression for the exchange, by casting to 16-bit dtypes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringdance.training.gradients.compression import compression_for


def _floating_dtype(tensor: Any) -> Any:
    """Return the tensor's dtype if it is a floating-point type, otherwise None."""
    return tensor.dtype if tensor.dtype.is_floating else None


Compression = compression_for(__name__, tf.float16, tf.bfloat16, _floating_dtype, tf.cast)
