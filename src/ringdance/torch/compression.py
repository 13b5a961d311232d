"""Compression of gradients on their way: cast to 16 bits. Contract 2.1.4."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Base for own compressions: ``compress`` makes a tensor smaller, ``decompress`` restores its type."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to be exchanged, and what ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the exchanged tensor in its former type."""
        raise NotImplementedError


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


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    if tensor.dtype.is_floating_point and tensor.dtype is not dtype:
        return tensor.to(dtype), tensor.dtype
    return tensor, None


class FP16Compressor(Compressor):
    """Casts floating tensors to float16. Values above 65,504 become infinite; scale the loss, or use bf16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its former type."""
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its former type."""
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(Compressor):
    """Casts floating tensors to bfloat16: the range of float32 with 8 bits of precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as bfloat16, and its former type."""
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its former type."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
