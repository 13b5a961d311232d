"""Compression of gradients on their way: cast to 16 bits, on every backend. Contract 2.2.4."""

from __future__ import annotations

from typing import Any

import keras

from ringdance.training.compression import Compressor

__all__ = ["Compression", "Compressor"]


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
    """Casts floating dense tensors to ``dtype``, and back."""

    dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the small type, and its former type."""
        if not keras.ops.is_tensor(tensor):
            return tensor, None
        former = keras.backend.standardize_dtype(tensor.dtype)
        if "float" not in former or former == cls.dtype:
            return tensor, None
        return keras.ops.cast(tensor, cls.dtype), former

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former type."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Casts to float16. Values above 65,504 become infinite; use loss scaling, or bf16."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """Casts to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = "bfloat16"


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
