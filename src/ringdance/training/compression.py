"""What a compression is: a pair of functions around the exchange of a gradient. Contract 2.1.4."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["CastCompressor", "Compressor", "NoneCompressor"]


@runtime_checkable
class Compressor(Protocol):
    """Makes a tensor smaller before it is exchanged, and gives it back afterwards.

    Any object with these two will do: a class with static methods, given as it is, or an object with
    methods. The bindings' own ones, ``Compression.none``, ``.fp16`` and ``.bf16``, cast floating tensors
    and pass others unchanged; sums of 16-bit floats are taken in float32 and rounded once (on hosts and
    between them: once in each).
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the smaller tensor and what ``decompress`` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former type."""
        ...


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


class CastCompressor(Compressor):
    """Casts floating tensors to ``dtype``, and back. A binding's subclass knows its tensors.

    A sum above 65,504 becomes infinite in float16: scale the loss, or use bfloat16, which has the range of
    float32 with 8 bits of precision.
    """

    dtype: Any

    @classmethod
    def former(cls, tensor: Any) -> Any:
        """Return the tensor's type if it is floating and not ``dtype`` already, else None."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in another type."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the small type, and its former type."""
        former = cls.former(tensor)
        return (tensor, None) if former is None else (cls.cast(tensor, cls.dtype), former)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former type."""
        return tensor if ctx is None else cls.cast(tensor, ctx)
