"""Plan how to cut a list of tensors into cache-sized chunks.

The tensors of a batch form one long row of elements. A *chunk* of the row stays in the cache while it is
copied in, reduced and copied out. Each of the n members of a host owns one *block* of every chunk. A block
is a list of *segments*, each within one tensor. All functions are pure, so all ranks make the same plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

_LINE = 16  # elements per cache line, for 4-byte numbers


class Segment(NamedTuple):
    """Elements [start, stop) of tensor number ``tensor``, which occupy [at, end) in the buffer."""

    tensor: int
    start: int
    stop: int
    at: int
    end: int


def segments(bounds: Sequence[int], start: int, stop: int, at: int) -> tuple[Segment, ...]:
    """Cut elements [start, stop) of the row at tensor boundaries.

    Args:
        bounds: Start of each tensor in the row, and the row's length.
        start: First element.
        stop: Index after the last element.
        at: Position of the first element in the buffer.
    """
    pieces = []
    tensor = bisect_right(bounds, start) - 1
    while start < stop:
        end = min(stop, bounds[tensor + 1])
        if end > start:
            base = bounds[tensor]
            pieces.append(Segment(tensor, start - base, end - base, at, at + end - start))
            at += end - start
        start = end
        tensor += 1
    return tuple(pieces)


@lru_cache(maxsize=256)
def chunks(sizes: tuple[int, ...], limit: int, members: int) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
    """Return, for each chunk and each member, the segments of the block that the member owns.

    Args:
        sizes: Number of elements in each tensor.
        limit: Maximum number of elements per chunk. All chunks have about the same size.
        members: Number of blocks per chunk.
    """
    bounds = [0, *accumulate(sizes)]
    row = bounds[-1]
    if not row:
        return ()
    even = -(-row // -(-row // limit))
    length = min(limit, -(-even // (_LINE * members)) * _LINE * members)
    # A block has the same position in all chunks, because two chunks use a buffer at the same time, and the
    # results of one must not overlap the inputs of the other.
    offsets = [min(length, -(-(length * i // members) // _LINE) * _LINE) for i in range(members)] + [length]
    plan = []
    for start in range(0, row, length):
        cuts = [min(start + offset, row) for offset in offsets]
        plan.append(tuple(segments(bounds, cuts[i], cuts[i + 1], offsets[i]) for i in range(members)))
    return tuple(plan)


def even_rows(rows: int, members: int) -> list[int]:
    """Return each member's row count in a reducescatter. The first members may receive one more row."""
    share, rest = divmod(rows, members)
    return [share + (member < rest) for member in range(members)]
