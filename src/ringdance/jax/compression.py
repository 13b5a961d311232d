"""Compression of gradients on their way: cast to 16 bits. Contract 2.1.4."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ringdance.training.compression import Compressor

__all__ = ["Compression", "Compressor"]


class NoneCompressor(Compressor):
    """Leaves arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the array itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the array itself."""
        return tensor


class _Cast(Compressor):
    """Casts floating arrays to ``dtype``, and back."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the array in the small type, and its former type."""
        if jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype != cls.dtype:
            return tensor.astype(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the array in its former type."""
        return tensor if ctx is None else tensor.astype(ctx)


class FP16Compressor(_Cast):
    """Casts floating arrays to float16. Values above 65,504 become infinite; scale the loss, or use bf16."""

    dtype = jnp.float16


class BF16Compressor(_Cast):
    """Casts floating arrays to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = jnp.bfloat16


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
