"""Compression of gradients on their way: cast to 16 bits. Contract 2.1.4."""

from __future__ import annotations

from typing import Any

import torch

from ringdance.training.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(CastCompressor):
    @classmethod
    def former(cls, tensor: Any) -> Any:
        floating = tensor.dtype.is_floating_point and tensor.dtype is not cls.dtype
        return tensor.dtype if floating else None

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """Casts floating tensors to float16. Values above 65,504 become infinite; scale the loss, or use bf16."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Casts floating tensors to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
