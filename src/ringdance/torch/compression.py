"""Compression of gradients on their way: cast to 16 bits. Contract 2.1.4."""

from __future__ import annotations

from typing import Any

import torch

from ringdance.training.compression import Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class _Cast(Compressor):
    """Casts floating tensors to ``dtype``, and back."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in the small type, and its former type."""
        if tensor.dtype.is_floating_point and tensor.dtype is not cls.dtype:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its former type."""
        return tensor if ctx is None else tensor.to(ctx)


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
