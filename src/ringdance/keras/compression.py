"""Compression of gradients on their way: cast to 16 bits. Contract 2.2.4."""

from __future__ import annotations

from typing import Any

from ringdance.keras.library import ops
from ringdance.training.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(CastCompressor):
    @classmethod
    def former(cls, tensor: Any) -> Any:
        if not ops.is_tensor(tensor):
            return None
        dtype = ops.dtype_name(tensor.dtype)
        return dtype if "float" in dtype and dtype != cls.dtype else None

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return ops.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """Casts floating tensors to float16. Values above 65,504 become infinite; scale the loss, or use bf16."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """Casts floating tensors to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = "bfloat16"


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
