"""Exchange through the transport's collectives: between hosts, and on a host without a window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Context, Exchange, Steps, as_bytes, copy_range
from ringdance.core.exchange.chunks import chunks, even_rows
from ringdance.core.exchange.sizes import Sizes
from ringdance.core.transport.base import Pending, Transport

_IN_FLIGHT = 4  # number of chunks in flight, enough to overlap packing, sending and unpacking
_AHEAD = 2  # number of chunks to send before reducing the first, to keep the network busy
_POLLS = 8  # number of consecutive tests for completion; MPI moves data only during tests
_FEW = 16  # maximum number of members that send the blocks of a chunk to each other
# Number of rounds in flight. The second keeps the network busy while the first is packed or unpacked.
_ROUNDS = 2

_Handle = Callable[[int, Array], Steps]
# A round in flight, and a function that unpacks its data (None if there is nothing to unpack).
_Posted = tuple[Pending, Callable[[], None] | None]


def sends_to_few(members: int) -> bool:
    """Return True if MPI's all-reduce sends fewer messages than an exchange of blocks, and no more bytes.

    This holds if the number of members is a power of two. Otherwise, some members send twice as much.
    """
    return members > _FEW and members & (members - 1) == 0


class _ChunkInFlight:
    """A chunk that is being reduced over the members of a transport.

    Blocks are sent to their owners, who reduce them in rank order and send the results to all members. Each
    member sends and receives less than two chunks, regardless of the number of members. All members must call
    the methods of all chunks in the same order.

    Args:
        transport: Connects the members that reduce.
        small_bytes: Maximum size, in bytes, of a chunk that MPI's own all-reduce reduces, because it is
            faster for small chunks. Negative for none.
        context: State that the engine's exchanges share.
        chunk_bytes: Size of the largest chunk.

    Attributes:
        memory: Memory for the chunk. Lent to ``load`` until ``start``, and to ``unload`` after ``complete``.
        buffer: The data to send, and after ``complete``, the result.
    """

    def __init__(self, transport: Transport, small_bytes: int, context: Context, chunk_bytes: int) -> None:
        self._transport, self._small, self._context = transport, small_bytes, context
        self.memory = np.empty(chunk_bytes, np.uint8)
        self._scratch = np.empty(chunk_bytes + 16 * transport.size, np.uint8)
        self._pending: Pending | None = None

    def start(self, buffer: Array, how: Reduction) -> None:
        """Send the contents of ``buffer``, which is part of ``memory``."""
        self.buffer, self._how = buffer, how
        size = self._transport.size
        by_mpi = self._small >= 0 and (sends_to_few(size) or buffer.nbytes <= self._small)
        self._whole = by_mpi and how.mpi_op is not None
        if not buffer.size:
            return
        if self._whole:
            assert how.mpi_op is not None
            # Not in place, because Open MPI's Iallreduce would then use a binomial tree, whose root sends the
            # buffer log2(size) times each way.
            self.buffer = self._scratch[: buffer.nbytes].view(how.dtype)
            self._pending = self._transport.allreduce(buffer, how.mpi_op, self.buffer)
            return
        item = how.dtype.itemsize
        rows = even_rows(buffer.size, size)
        own = rows[self._transport.rank]
        self._counts = [row * item for row in rows]
        self._parts = self._scratch[: own * size * item].view(how.dtype).reshape(size, own)
        self._pending = self._transport.alltoall(
            as_bytes(buffer), self._counts, as_bytes(self._parts), [own * item] * size
        )

    def reduce(self) -> Steps:
        """Reduce this member's block and send the result."""
        if self._whole or not self.buffer.size:
            return
        yield from self._wait()
        total = self._parts[0]
        self._how.combine(list(self._parts), total)
        self._pending = self._transport.allgather(as_bytes(total), as_bytes(self.buffer), self._counts)

    def _wait(self) -> Steps:
        assert self._pending is not None
        return completed(self._pending, self._context)

    def test(self) -> None:
        """Call the MPI library, which moves data only during calls."""
        if self._pending is not None:
            self._pending.test()

    def complete(self) -> Steps:
        """Wait until ``buffer`` holds the result, which the caller must copy with ``how.deliver``."""
        if self.buffer.size:
            yield from self._wait()
            if self._whole:
                self._how.complete(self.buffer)


def completed(pending: Pending, context: Context) -> Steps:
    """Wait for a collective operation of the transport."""
    context.in_transit += 1
    try:
        while not any(pending.test() for _ in range(_POLLS)):
            yield
    finally:
        context.in_transit -= 1


class ChunkPipeline:
    """Reduces chunks over one transport, with several chunks in flight.

    Args:
        transport: Connects the members that reduce.
        chunk_bytes: Size of the largest chunk.
        small_bytes: Maximum size, in bytes, of a chunk that MPI's own all-reduce reduces, because it is
            faster for small chunks. Negative for none.
        context: State that the engine's exchanges share.
    """

    def __init__(self, transport: Transport, chunk_bytes: int, small_bytes: int, context: Context) -> None:
        self._context = context
        self._ring = [_ChunkInFlight(transport, small_bytes, context, chunk_bytes) for _ in range(_IN_FLIGHT)]

    def run(self, lengths: Sequence[int], how: Reduction, load: _Handle, unload: _Handle) -> Steps:
        """Reduce chunks.

        Args:
            lengths: Number of elements in each chunk.
            how: How the chunks are reduced.
            load: Called with a chunk's number and an array, which it fills with this member's input.
            unload: Called with a chunk's number and its result, which it copies with ``how.deliver``. The
                result's array is reused afterwards.
        """
        ring, count = self._ring, len(lengths)
        for number in range(count + _IN_FLIGHT):
            chunk = ring[number % _IN_FLIGHT]
            if number >= _IN_FLIGHT:
                yield from chunk.complete()
                self._context.achieved += 1
                yield from self._meanwhile(unload(number - _IN_FLIGHT, chunk.buffer))
            if number < count:
                buffer = chunk.memory[: lengths[number] * how.dtype.itemsize].view(how.dtype)
                yield from self._meanwhile(load(number, buffer))
                chunk.start(buffer, how)
            if _AHEAD <= number < count + _AHEAD:
                yield from ring[(number - _AHEAD) % _IN_FLIGHT].reduce()
                self._context.achieved += 1

    def _meanwhile(self, steps: Steps) -> Steps:
        """Run ``steps``. Whenever they wait, test the chunks in flight, so that MPI moves their data."""
        self._context.in_transit += 1
        try:
            for _ in steps:
                for chunk in self._ring:
                    chunk.test()
                yield
        finally:
            self._context.in_transit -= 1


class MpiExchange(Exchange):
    """Uses non-blocking collectives on chunks, so that MPI's counts stay small even for large tensors.

    Args:
        transport: Connects all members.
        sizes: How many bytes to send at a time.
        context: State that the engine's exchanges share.
    """

    def __init__(self, transport: Transport, sizes: Sizes, context: Context) -> None:
        super().__init__(transport.rank, transport.size, context)
        self._transport = transport
        self.most_chunk_bytes = sizes.max_chunk
        self._set_sizes(sizes)
        self._pipeline = ChunkPipeline(transport, sizes.max_flat_chunk, sizes.small, context)

    def set_chunks(self, chunk_bytes: int, wire_bytes: int) -> None:
        self._set_sizes(self._sizes.changed(chunk_bytes, wire_bytes))

    def _set_sizes(self, sizes: Sizes) -> None:
        self._sizes, self.chunk_bytes, self.wire_bytes = sizes, sizes.chunk, sizes.wire

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        plan = chunks(tuple([view.size for view in inputs]), self._sizes.flat_chunk // how.dtype.itemsize, 1)

        def load(number: int, buffer: Array) -> Steps:
            for tensor, start, stop, at, end in plan[number][0]:
                how.prepare(inputs[tensor][start:stop], buffer[at:end])
            yield from ()

        def unload(number: int, buffer: Array) -> Steps:
            for tensor, start, stop, at, end in plan[number][0]:
                how.deliver(buffer[at:end], outputs[tensor][start:stop])
            yield from ()

        yield from self._pipeline.run([part[-1].end for (part,) in plan], how, load, unload)

    def _rounds(self, length: int, row: int, post: Callable[[int, _Memory], _Posted]) -> Steps:
        """Move rows in rounds, of which up to two are in flight at the same time.

        Args:
            length: Length of the longest row, in bytes or elements. The same on all members.
            row: Maximum length, in the same unit, of the part of each row that one round moves.
            post: Starts the round that moves the parts at an offset in the rows. The memory passed to it is
                reused once the round is complete.
        """
        if length <= row:  # for most calls, one round is enough
            if length:
                yield from self._complete(post(0, _Memory()))
            return
        memory = [_Memory() for _ in range(_ROUNDS)]
        posted: deque[_Posted] = deque()
        for number, start in enumerate(range(0, length, row)):
            if len(posted) == _ROUNDS:
                yield from self._complete(posted.popleft())
            posted.append(post(start, memory[number % _ROUNDS]))
        while posted:
            yield from self._complete(posted.popleft())

    def _complete(self, posted: _Posted) -> Steps:
        pending, complete = posted
        yield from completed(pending, self.context)
        if complete is not None:
            complete()
        self.context.achieved += 1

    def stream(
        self, sends: Sequence[Array], lengths: Sequence[int], receives: Sequence[Sequence[Array] | None]
    ) -> Steps:
        own, transport = self.rank, self._transport
        send_bounds = self.bounds(sends)
        receive_bounds = [self.bounds(views or ()) for views in receives]
        row_bytes = self._sizes.row(len(lengths) - lengths.count(0))

        def post(start: int, memory: _Memory) -> _Posted:
            counts = [max(0, min(row_bytes, length - start)) for length in lengths]
            stop = start + counts[own]
            if stop <= start:
                ours = memory.take("send", 0)
            elif len(sends) == 1:
                ours = sends[0][start:stop]
            else:
                ours = memory.take("send", counts[own])
                copy_range(sends, send_bounds, start, stop, ours, outward=False)
            if counts.count(0) < self.size - 1:
                rows = memory.take("receive", sum(counts))
                return transport.allgather(ours, rows, counts), lambda: unpack(start, counts, rows)
            root = counts.index(max(counts))
            views = receives[root]
            if root == own:
                return transport.broadcast(ours, root), None
            if views is not None and len(views) == 1:
                return transport.broadcast(views[0][start : start + counts[root]], root), None
            rows = memory.take("receive", counts[root])
            return transport.broadcast(rows, root), lambda: unpack(start, counts, rows)

        def unpack(start: int, counts: Sequence[int], rows: Array) -> None:
            at = 0
            for rank, count in enumerate(counts):
                views = receives[rank]
                if views is not None and rank != own and count:
                    row = rows[at : at + count]
                    copy_range(views, receive_bounds[rank], start, start + count, row, outward=True)
                at += count

        yield from self._rounds(max(lengths), row_bytes, post)

    def alltoall(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Steps:
        own, size, transport = self.rank, self.size, self._transport
        yield from self.copy(sends[own], receives[own])
        row_bytes = self._sizes.row(size)

        def parts(views: Sequence[Array], start: int) -> list[Array]:
            return [view[start : start + row_bytes * (rank != own)] for rank, view in enumerate(views)]

        def post(start: int, memory: _Memory) -> _Posted:
            outgoing, incoming = parts(sends, start), parts(receives, start)
            send_counts, receive_counts = [part.size for part in outgoing], [part.size for part in incoming]
            send = memory.take("send", sum(send_counts))
            receive = memory.take("receive", sum(receive_counts))
            np.concatenate(outgoing, out=send)

            def complete() -> None:
                at = 0
                for part in incoming:
                    part[...] = receive[at : at + part.size]
                    at += part.size

            return transport.alltoall(send, send_counts, receive, receive_counts), complete

        yield from self._rounds(longest, row_bytes, post)

    def reducescatter(self, source: Array, rows: Sequence[int], output: Array, how: Reduction) -> Steps:
        own, size, item, transport = self.rank, self.size, how.dtype.itemsize, self._transport
        firsts = list(accumulate(rows, initial=0))
        row_length = self._sizes.row(size) // item

        def post(start: int, memory: _Memory) -> _Posted:
            counts = [max(0, min(row_length, row - start)) for row in rows]
            send = memory.take("send", sum(counts) * item).view(how.dtype)
            at = 0
            for first, count in zip(firsts, counts, strict=False):
                how.prepare(source[first + start : first + start + count], send[at : at + count])
                at += count
            count = counts[own]
            parts = memory.take("receive", size * count * item).view(how.dtype).reshape(size, count)

            def complete() -> None:
                total = parts[0]
                how.combine(list(parts), total)
                how.deliver(total, output[start : start + count])

            send_bytes = [count * item for count in counts]
            receive_bytes = [count * item] * size
            return transport.alltoall(as_bytes(send), send_bytes, as_bytes(parts), receive_bytes), complete

        yield from self._rounds(max(rows), row_length, post)


class _Memory:
    """Buffers for a round in flight. Later rounds of the same collective reuse them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, nbytes: int) -> Array:
        """Return the first ``nbytes`` of the buffer called ``name``, as uint8. The contents are undefined."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]
