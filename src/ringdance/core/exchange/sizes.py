"""Choose how many bytes to send between hosts at a time.

All functions are pure and return the same result on every member of the process set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIN_BLOCK_BYTES = 256  # minimum chunk size per member of a host: 16 elements of any dtype
_MESSAGE = 16 << 10  # minimum block size in bytes; shorter messages take more CPU time than network time
_MAX_WIRE = 16 << 20  # size in bytes up to which ``_wire`` enlarges sends
# Maximum size of a round in bytes. It is far below 2^31, the limit of MPI's counts. Beyond 4 MiB, the size
# hardly matters.
_MAX_ROUND = 16 << 20
_LINE = 64  # cache line size in bytes, a multiple of any dtype's size


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an exchange between hosts, in bytes unless the name says otherwise.

    An all-reduce either has a stage within hosts or is *flat*: all members reduce its chunks together.
    Created by ``sizes_for``.

    Attributes:
        small: All-reduces up to this size are flat, and may use MPI's own all-reduce. Negative for none.
        chunk: Size of a chunk within hosts, or 0 if all all-reduces are flat.
        flat_chunk: Size of a chunk in a flat all-reduce.
        wire: Number of bytes sent between hosts at a time: the blocks of several chunks, or a flat chunk.
        chunks_per_wire: Number of chunks whose blocks are sent together.
        blocks: Number of blocks per chunk: one for each member on the smallest host. 0 if all
            all-reduces are flat.
        min_chunk, max_chunk: Bounds of ``chunk``.
        max_flat_chunk: Upper bound of ``flat_chunk``, for which memory is allocated.
        first_wire, first_flat_chunk: The values of ``wire`` and ``flat_chunk`` that ``sizes_for`` chose. As
            long as ``wire`` has its first value, so does ``flat_chunk``.
    """

    small: int
    chunk: int
    flat_chunk: int
    wire: int
    chunks_per_wire: int
    blocks: int
    min_chunk: int
    max_chunk: int
    max_flat_chunk: int
    first_wire: int
    first_flat_chunk: int

    @property
    def max_wire(self) -> int:
        """Maximum size of the blocks that are sent together. Memory is allocated for this size."""
        return max(self.max_flat_chunk, self.first_wire)

    def changed(self, chunk: int, wire: int) -> Sizes:
        """Return a copy with new values of ``chunk`` and ``wire``, which are clamped to their bounds."""
        chunk = min(max(chunk, self.min_chunk), self.max_chunk)
        per_wire = max(1, min(wire, self.max_wire) // _block(chunk, self.blocks)) if self.blocks else 1
        flat_chunk = self.first_flat_chunk
        if wire != self.first_wire:
            wire = flat_chunk = _flat_chunk(wire, self.small, self.max_flat_chunk)
        return replace(self, chunk=chunk, flat_chunk=flat_chunk, wire=wire, chunks_per_wire=per_wire)

    def row(self, rows: int) -> int:
        """Return how many bytes of each of ``rows`` rows one round moves: a multiple of any dtype's size.

        Used by reducescatter, and by collectives that do not reduce.
        """
        return max(_LINE, min(_MAX_ROUND, 32 * self.first_flat_chunk) // max(1, rows) // _LINE * _LINE)


def sizes_for(
    members: int, chunk_bytes: int, small_bytes: int, largest_chunk: int = 0, host_sizes: Sequence[int] = ()
) -> Sizes:
    """Choose the sizes of an exchange.

    Args:
        members: Number of members.
        chunk_bytes: Maximum size, in bytes, of the chunk that is reduced at a time.
        small_bytes: See ``Sizes.small``.
        largest_chunk: Upper bound, in bytes, for later changes of the chunk size. With a stage within hosts,
            this is the size of each member's buffer.
        host_sizes: Number of members on each host, if there is a stage within hosts.
    """
    flat_wire = _wire(members, max(_LINE, small_bytes, chunk_bytes))
    max_flat_chunk = max(flat_wire, largest_chunk)
    flat_chunk = wire = _flat_chunk(flat_wire, small_bytes, max_flat_chunk)
    chunk = blocks = min_chunk = max_chunk = 0
    if host_sizes:
        # These sizes are the same on all hosts, regardless of how many members each host has.
        blocks, min_chunk, max_chunk = min(host_sizes), MIN_BLOCK_BYTES * max(host_sizes), largest_chunk
        chunk = min(max(chunk_bytes, min_chunk), max_chunk)
        block = _block(chunk, blocks)
        wire = _wire(len(host_sizes), block) // block * block
    sizes = Sizes(
        small=small_bytes, chunk=chunk, flat_chunk=flat_chunk, wire=wire, chunks_per_wire=1, blocks=blocks,
        min_chunk=min_chunk, max_chunk=max_chunk, max_flat_chunk=max_flat_chunk, first_wire=wire,
        first_flat_chunk=flat_chunk,
    )  # fmt: skip
    return sizes.changed(chunk, wire)


def _wire(members: int, chunk_bytes: int) -> int:
    """Return how many bytes to send at a time, so that the members' blocks are not short messages."""
    return max(chunk_bytes, min(_MESSAGE * members, _MAX_WIRE))


def _block(chunk: int, blocks: int) -> int:
    """Return the maximum size, in bytes, of a block in a chunk."""
    return chunk // blocks + MIN_BLOCK_BYTES


def _flat_chunk(wanted: int, small: int, highest: int) -> int:
    return min(max(wanted, small, _LINE), highest) // _LINE * _LINE
