"""What a compression is: a pair of functions around the exchange of a gradient. Contract 2.1.4."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Compressor"]


@runtime_checkable
class Compressor(Protocol):
    """Makes a tensor smaller before it is exchanged, and gives it back afterwards.

    Any object with these two will do: a class with static methods, given as it is, or an object with
    methods. The bindings' own ones, ``Compression.none``, ``.fp16`` and ``.bf16``, cast floating tensors
    and pass others unchanged; sums of 16-bit floats are taken in float32 and rounded once.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the smaller tensor and what ``decompress`` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former type."""
        ...
