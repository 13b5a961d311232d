"""Derive the phases of a batch's chunks, and the activities of each tensor, from the records."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

from ringdance.core.ring import Record

Span = tuple[str, int, int]
WAIT, COPY_OUT, REDUCE, COPY_IN = (
    "WAIT_FOR_DATA", "MEMCPY_OUT_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER",
)  # fmt: skip
_ORDER = (WAIT, COPY_OUT, REDUCE, COPY_IN)


class Chunk(NamedTuple):
    """One or several consecutive chunks: start time, and durations of the phases, in nanoseconds."""

    time: int
    durations: list[int]


def chunks_of(records: Sequence[Record]) -> list[Chunk]:
    """Return the chunks of a batch. A record for several chunks covers the time until the next record."""
    chunks = []
    for record, after in zip_longest(records, records[1:]):
        wait, copy_out, reduce, copy_in, count = record.values
        durations = [1000 * wait, copy_out, reduce, copy_in]
        if count > 1 and after:
            factor = (after.time - record.time) / (sum(durations) or 1)
            durations = [int(factor * duration) for duration in durations]
        chunks.append(Chunk(record.time, durations))
    return chunks


def phases(chunks: Sequence[Chunk]) -> Iterator[Span]:
    """Yield the name, start and end of each of the chunks' phases."""
    for chunk in chunks:
        at = chunk.time
        for name, duration in zip(_ORDER, chunk.durations, strict=True):
            if duration:
                yield name, at, at + duration
            at += duration


def activities(chunks: Sequence[Chunk], nbytes: Sequence[int]) -> list[list[Span]]:
    """Return when each tensor of a batch was copied in, reduced and copied out.

    Chunks hold equal parts of the batch's bytes. A tensor may span several chunks, and a chunk may
    hold several tensors.

    Args:
        chunks: Chunks of the batch.
        nbytes: Size of each tensor, in the batch's order.
    """
    total = sum(nbytes)
    count = len(chunks) - 2  # the first chunk only copies in, the last one only copies out
    if count < 1 or not total:
        return [[] for _ in nbytes]
    edges = [total * number // count for number in range(count + 1)]
    spans = []
    for end, size in zip(accumulate(nbytes), nbytes, strict=True):
        first = max(0, bisect_right(edges, end - size) - 1)
        last = max(first, min(count - 1, bisect_left(edges, end) - 1))
        copied_in = _phase(chunks[first], 3)[0]  # phase 3 of a chunk copies in the next chunk
        reduce_from, reduce_to = _phase(chunks[first + 1], 2)[0], _phase(chunks[last + 1], 2)[1]
        copied_out = _phase(chunks[last + 2], 1)[1]
        edges_of = (copied_in, reduce_from, reduce_to, copied_out)
        spans.append(list(zip((COPY_IN, REDUCE, COPY_OUT), edges_of, edges_of[1:], strict=False)))
    return spans


def _phase(chunk: Chunk, number: int) -> tuple[int, int]:
    """Return the start and end of phase ``number`` of a chunk."""
    began = chunk.time + sum(chunk.durations[:number])
    return began, began + chunk.durations[number]
