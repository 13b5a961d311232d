"""Plans: how a list of tensors is cut into cache-sized pieces. Pure functions, the same on all ranks.

The tensors of a batch are taken as one long row of elements. A *piece* is a part of it that
stays in the cache while it is copied in, reduced and copied out; each of the n members of a
host owns one *slice* of every piece. A slice is a list of *segments*, parts of one tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Segment", "even_rows", "pieces", "segments"]

_LINE = 16  # elements: whole cache lines for 4-byte numbers


class Segment(NamedTuple):
    """Elements [start, stop) of tensor number ``tensor``, at ``at`` in the area (to ``end``)."""

    tensor: int
    start: int
    stop: int
    at: int
    end: int


def segments(bounds: Sequence[int], start: int, stop: int, at: int) -> tuple[Segment, ...]:
    """Cut elements [start, stop) of the row at tensor borders; the first goes to ``at`` in the area.

    ``bounds`` holds where each tensor begins in the row, and the row's length.
    """
    found = []
    tensor = bisect_right(bounds, start) - 1
    while start < stop:
        end = min(stop, bounds[tensor + 1])
        if end > start:
            base = bounds[tensor]
            found.append(Segment(tensor, start - base, end - base, at, at + end - start))
            at += end - start
        start = end
        tensor += 1
    return tuple(found)


@lru_cache(maxsize=256)
def pieces(sizes: tuple[int, ...], piece: int, members: int) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
    """Return for each piece, for each member, the segments of the slice it owns.

    Args:
        sizes: elements of each tensor.
        piece: most elements of a piece; pieces are about equal.
        members: how many share the work.
    """
    bounds = [0, *accumulate(sizes)]
    row = bounds[-1]
    if not row:
        return ()
    even = -(-row // -(-row // piece))
    length = min(piece, -(-even // (_LINE * members)) * _LINE * members)
    # A slice has the same place in the area in all pieces: of two pieces that are in an area at a time,
    # one's results and the other's parts must not meet.
    places = [min(length, -(-(length * i // members) // _LINE) * _LINE) for i in range(members)] + [length]
    plan = []
    for start in range(0, row, length):
        cuts = [min(start + place, row) for place in places]
        plan.append(tuple(segments(bounds, cuts[i], cuts[i + 1], places[i]) for i in range(members)))
    return tuple(plan)


def even_rows(rows: int, members: int) -> list[int]:
    """Return how many of ``rows`` each member gets from a reducescatter (contract 3.5)."""
    share, rest = divmod(rows, members)
    return [share + (place < rest) for place in range(members)]
