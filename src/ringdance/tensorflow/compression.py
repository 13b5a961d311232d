"""Compression of gradients on their way: cast to 16 bits. Contract 2.1.4 and 2.2.4."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringdance.training.compression import Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class _Cast(Compressor):
    """Casts floating tensors to ``dtype``, and back."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the small type, and its former type."""
        if tensor.dtype.is_floating and tensor.dtype != cls.dtype:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former type."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Casts floating tensors to float16. Values above 65,504 become infinite; scale the loss, or use bf16."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """Casts floating tensors to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
