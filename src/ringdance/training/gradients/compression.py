"""Compress gradients before they are exchanged, and decompress them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Compressor(Protocol):
    """Makes a tensor smaller before it is exchanged, and restores it afterwards.

    Any object with the two methods works: an instance, or a class with static methods, for example.
    The bindings' own compressors, ``Compression.none``, ``.fp16`` and ``.bf16``, cast floating-point tensors
    and leave others unchanged. Sums of 16-bit floats are computed in float32 and rounded once (twice if they
    are computed within hosts and then between hosts).
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the compressed tensor, and the context that ``decompress`` needs."""
        ...

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the decompressed tensor, with its original dtype."""
        ...


class NoneCompressor(Compressor):
    """Leaves tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors to ``dtype`` and back.

    In float16, sums above 65,504 overflow to infinity. To avoid this, scale the loss or use bfloat16, which
    has the range of float32 but only 8 bits of precision.
    """

    dtype: Any
    floating_dtype: Callable[[Any], Any]
    cast: Callable[[Any, Any], Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor with the smaller dtype, and its original dtype if it was cast."""
        original = cls.floating_dtype(tensor)
        if original is None or original == cls.dtype:
            return tensor, None
        return cls.cast(tensor, cls.dtype), original

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor with its original dtype."""
        return tensor if ctx is None else cls.cast(tensor, ctx)


def compression_for(
    module: str, float16: Any, bfloat16: Any, floating_dtype: Callable[[Any], Any],
    cast: Callable[[Any, Any], Any],
) -> Any:
    """Return a framework's ``Compression``: a class with the compressors ``none``, ``fp16`` and ``bf16``.

    Args:
        module: Module in which the class has the name ``Compression``. Pickling compressors requires this.
        float16: The framework's float16 dtype.
        bfloat16: The framework's bfloat16 dtype.
        floating_dtype: Function that returns a tensor's dtype if it is floating-point, otherwise ``None``.
        cast: Function that casts a tensor to another dtype.
    """

    def compressor(name: str, dtype: Any) -> type[Compressor]:
        functions = {"floating_dtype": staticmethod(floating_dtype), "cast": staticmethod(cast)}
        names = {"__module__": module, "__qualname__": f"Compression.{name}", "dtype": dtype}
        return type(f"{name.upper()}Compressor", (_CastCompressor,), {**functions, **names})

    members: dict[str, Any] = {"none": NoneCompressor}
    members |= {"fp16": compressor("fp16", float16), "bf16": compressor("bf16", bfloat16)}
    return type("Compression", (), {"__module__": module, "__doc__": "The available compressors.", **members})
