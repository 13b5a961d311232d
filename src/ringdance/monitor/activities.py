"""What happened in a batch: the phases of its chunks, and which of them belong to which tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ringdance.core.ring import Record

__all__ = ["activities", "phases"]

Span = tuple[str, int, int]
WAIT, COPY_OUT, REDUCE, COPY_IN = (
    "WAIT_FOR_DATA", "MEMCPY_OUT_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER",
)  # fmt: skip
_ORDER = (WAIT, COPY_OUT, REDUCE, COPY_IN)


def phases(chunks: Sequence[Record]) -> Iterator[Span]:
    """Yield name, begin and end of each phase of the chunks."""
    for chunk in chunks:
        at = chunk.time
        for name, duration in zip(_ORDER, _durations(chunk), strict=False):
            if duration:
                yield name, at, at + duration
            at += duration


def activities(chunks: Sequence[Record], nbytes: Sequence[int]) -> list[list[Span]]:
    """Return for each tensor of a batch when it was copied in, reduced and copied out.

    Chunks hold equal parts of the batch's bytes: a tensor may lie in several chunks, and several in one.

    Args:
        chunks: records of the batch's chunks.
        nbytes: of each tensor, in the batch's order.
    """
    total = sum(nbytes)
    count = len(chunks) - 2  # the first record is copying in alone, the last one copying out
    if count < 1 or not total:
        return [[] for _ in nbytes]
    edges = [total * number // count for number in range(count + 1)]
    found = []
    for end, size in zip(accumulate(nbytes), nbytes, strict=True):
        first = max(0, bisect_right(edges, end - size) - 1)
        last = max(first, min(count - 1, bisect_left(edges, end) - 1))
        copied_in = _phase(chunks[first], 3)[0]  # as chunk n is reduced, n - 1 is copied out and n + 1 in
        reduce_from, reduce_to = _phase(chunks[first + 1], 2)[0], _phase(chunks[last + 1], 2)[1]
        copied_out = _phase(chunks[last + 2], 1)[1]
        edges_of = (copied_in, reduce_from, reduce_to, copied_out)
        found.append(list(zip((COPY_IN, REDUCE, COPY_OUT), edges_of, edges_of[1:], strict=False)))
    return found


def _phase(chunk: Record, number: int) -> tuple[int, int]:
    """Return begin and end of a phase of a chunk's record."""
    durations = _durations(chunk)
    began = chunk.time + sum(durations[:number])
    return began, began + durations[number]


def _durations(chunk: Record) -> tuple[int, int, int, int]:
    wait, *rest = chunk.values
    copy_out, reduce, copy_in, _ = rest
    return wait * 1000, copy_out, reduce, copy_in
