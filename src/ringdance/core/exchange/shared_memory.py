"""Exchange through the shared-memory window: each rank reads the other ranks' memory.

All-reduce of a chunk: every rank copies in the blocks that other ranks own. Each rank then reduces its own
block, from all peers' buffers and directly from its own tensor. Finally, all ranks copy the result out, and
scale it while they copy. This takes two passes over memory. Chunks are small enough to stay in the cache
between these steps. While one chunk is reduced, the next is copied in, so n chunks take n + 1 synchronization
points.
For batches of up to ``small_bytes``, all ranks reduce everything, which takes one synchronization point
instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from time import monotonic_ns
from typing import Any

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Context, Exchange, Steps, copy_range
from ringdance.core.exchange.chunks import Segment, chunks
from ringdance.core.exchange.sizes import MIN_BLOCK_BYTES
from ringdance.core.transport.window import Window

# Maximum size of each member's block in an all-reduce's chunk. Two members are 7% faster with chunks of
# 384 KiB than with chunks of 768 KiB, which do not fit in the L2 cache. With four or more members, it is more
# important to have few synchronization points.
_MAX_BLOCK_BYTES = 192 << 10
_RECORDED = 32  # chunks to record per batch in a timeline; recording all would slow exchanges by 1.5%
Blocks = Sequence[Sequence[Segment]]
_BYTE = np.dtype(np.uint8)


class SharedMemoryExchange(Exchange):
    """Exchanges data between the ranks of one host.

    Args:
        window: The members' shared memory.
        rank, size: This member's position in the reduction order, and the number of members.
        chunk_bytes: Maximum size, in bytes, of the chunk that is reduced at a time.
        small_bytes: Maximum size, in bytes, of a batch that takes the path with the lowest latency.
        context: State that the engine's exchanges share.
    """

    def __init__(
        self, window: Window, rank: int, size: int, chunk_bytes: int, small_bytes: int, context: Context
    ) -> None:
        super().__init__(rank, size, context)
        self._window = window
        self._chunk = min(max(chunk_bytes, MIN_BLOCK_BYTES * size), window.buffer_bytes)
        self._small = min(small_bytes, self._chunk)
        self.chunk_bytes = min(self._chunk, _MAX_BLOCK_BYTES * size)
        self.most_chunk_bytes = window.buffer_bytes
        self._typed: dict[int, list[list[Array]]] = {}

    def set_chunks(self, chunk_bytes: int, wire_bytes: int) -> None:
        least = max(MIN_BLOCK_BYTES * self.size, self._small)  # other collectives keep their chunk size
        self.chunk_bytes = min(max(chunk_bytes, least), self._window.buffer_bytes)

    def _buffers(self, dtype: np.dtype[Any]) -> list[Array]:
        """Return all members' buffers of the next parity, viewed as ``dtype``. See Note [Parity]."""
        key = dtype.num  # faster to hash than the dtype
        window = self._window
        if key not in self._typed:
            cut = window.buffer_bytes // dtype.itemsize * dtype.itemsize
            self._typed[key] = [[buffer[:cut].view(dtype) for buffer in row] for row in window.buffers]
        window.buffer_parity ^= 1
        return self._typed[key][window.buffer_parity]

    def _synchronize(self) -> Steps:
        window = self._window
        window.signal()
        while not window.reached():
            yield
        self.context.achieved += 1

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        if len(inputs) == 1:
            if inputs[0].nbytes <= self._small:
                return self._lone_allreduce(inputs[0], outputs[0], how)
        elif sum([view.nbytes for view in inputs]) <= self._small:
            return self._small_allreduce(inputs, outputs, how)
        return self._large_allreduce(tuple([view.size for view in inputs]), inputs, outputs, how)

    def _lone_allreduce(self, source: Array, target: Array, how: Reduction) -> Steps:
        size = source.size
        buffers = [buffer[:size] for buffer in self._buffers(how.dtype)]
        window = self._window
        how.prepare(source, buffers[window.index])
        window.signal()
        while not window.reached():
            yield
        self.context.achieved += 1
        how.combine(buffers, target)
        if how.late:
            how.deliver(target, target)

    def _small_allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        buffers = self._buffers(how.dtype)
        own_buffer = buffers[self._window.index]
        bounds = self.bounds(inputs)
        for view, at in zip(inputs, bounds, strict=False):
            how.prepare(view, own_buffer[at : at + view.size])
        yield from self._synchronize()
        total = np.empty(bounds[-1], how.dtype)
        how.combine([buffer[: bounds[-1]] for buffer in buffers], total)
        for view, at in zip(outputs, bounds, strict=False):
            how.deliver(total[at : at + view.size], view)

    def _large_allreduce(
        self, sizes: tuple[int, ...], inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction
    ) -> Steps:
        window, context = self._window, self.context
        own, deliver = window.index, how.deliver
        # This loop handles up to a thousand segments per step, so common cases have specialized code.
        reduce_block = self._add_block if how.simple and window.members == 2 else self._reduce_block
        plan = chunks(sizes, self.chunk_bytes // how.dtype.itemsize, window.members)
        marks, every = context.recorder.marks(), 1 + len(plan) // _RECORDED
        buffers = self._buffers(how.dtype)
        self._copy_in(plan[0], buffers[own], inputs, how)
        last = None
        for number, blocks in enumerate(plan, 1):
            window.signal()
            marked = marks and number % every == 1 % every
            if marked:
                marks.append(monotonic_ns())
            while not window.reached():
                yield
            context.achieved += 1
            if marked:
                marks.append(monotonic_ns())
            if last is not None:
                self._copy_out(*last, outputs, how)
            if marked:
                marks.append(monotonic_ns())
            reduce_block(blocks[own], buffers, inputs, how)
            own_buffer, last = buffers[own], (blocks, buffers)
            for tensor, start, stop, at, end in blocks[own]:  # while it is still in this core's cache
                deliver(own_buffer[at:end], outputs[tensor][start:stop])
            if marked:
                marks.append(monotonic_ns())
            if number < len(plan):  # one wait synchronizes this chunk's results and the next chunk's inputs
                buffers = self._buffers(how.dtype)
                self._copy_in(plan[number], buffers[own], inputs, how)
            if marked:
                marks.append(monotonic_ns())
        if marks:
            marks.append(monotonic_ns())
        yield from self._synchronize()
        assert last is not None
        if marks:
            marks.append(monotonic_ns())
        self._copy_out(*last, outputs, how)
        if marks:
            marks.append(monotonic_ns())
            context.recorder.chunks(self.set_id, marks, every)

    def _copy_in(self, blocks: Blocks, buffer: Array, inputs: Sequence[Array], how: Reduction) -> None:
        """Copy the blocks that other members own into this rank's buffer."""
        own = self._window.index
        for index, block in enumerate(blocks):
            if index == own:
                continue
            if how.identity:
                for tensor, start, stop, at, end in block:
                    buffer[at:end] = inputs[tensor][start:stop]
            else:
                for tensor, start, stop, at, end in block:
                    how.prepare(inputs[tensor][start:stop], buffer[at:end])

    def _copy_out(
        self, blocks: Blocks, buffers: Sequence[Array], outputs: Sequence[Array], how: Reduction
    ) -> None:
        """Copy the blocks that other members have reduced from their buffers to ``outputs``."""
        own, deliver = self._window.index, how.deliver
        for index, block in enumerate(blocks):
            if index == own:
                continue
            result = buffers[index]
            for tensor, start, stop, at, end in block:
                deliver(result[at:end], outputs[tensor][start:stop])

    def reduce_in_host(
        self, blocks: Blocks, owned: Sequence[Segment], inputs: Sequence[Array], how: Reduction, total: Array
    ) -> Steps:
        """Reduce a chunk within this host. This rank's own block goes into ``total``."""
        buffers = self._buffers(how.dtype)
        self._copy_in(blocks, buffers[self._window.index], inputs, how)
        yield from self._synchronize()
        self._reduce_block(owned, buffers, inputs, how, total, owned[0].at if owned else 0)

    def gather_in_host(
        self, blocks: Blocks, owned: Sequence[Segment], total: Array, outputs: Sequence[Array], how: Reduction
    ) -> Steps:
        """Copy a reduced chunk to all ranks on this host. ``total`` is this rank's block."""
        buffers, own = self._buffers(how.dtype), self._window.index
        for tensor, start, stop, at, end in owned:
            first = owned[0].at
            buffers[own][at:end] = total[at - first : end - first]
            how.deliver(total[at - first : end - first], outputs[tensor][start:stop])
        yield from self._synchronize()
        self._copy_out(blocks, buffers, outputs, how)

    def _add_block(
        self, block: Sequence[Segment], buffers: Sequence[Array], inputs: Sequence[Array], how: Reduction
    ) -> None:
        """Like ``_reduce_block``, but for two members, with nothing to scale before the sum."""
        first, second = buffers
        ufunc = how.ufunc
        if self._window.index == 0:
            for tensor, start, stop, at, end in block:
                ufunc(inputs[tensor][start:stop], second[at:end], out=first[at:end])
        else:
            for tensor, start, stop, at, end in block:
                ufunc(first[at:end], inputs[tensor][start:stop], out=second[at:end])

    def _reduce_block(
        self, block: Sequence[Segment], buffers: Sequence[Array], inputs: Sequence[Array], how: Reduction,
        out: Array | None = None, first: int = 0,
    ) -> None:
        """Reduce this rank's own block in rank order, without copying this rank's tensors.

        The result goes into this rank's buffer, or into ``out``, which starts at position ``first``.
        """

        own = self._window.index
        target = buffers[own] if out is None else out
        for tensor, start, stop, at, end in block:
            source = inputs[tensor][start:stop]
            if not how.identity:
                scaled = np.empty_like(source)
                how.prepare(source, scaled)
                source = scaled
            how.combine(
                [source if index == own else buffer[at:end] for index, buffer in enumerate(buffers)],
                target[at - first : end - first],
            )

    def stream(
        self, sends: Sequence[Array], lengths: Sequence[int], receives: Sequence[Sequence[Array] | None]
    ) -> Steps:
        step = self._chunk
        send_bounds = self.bounds(sends)
        receive_bounds = [self.bounds(views or ()) for views in receives]
        for start in range(0, max(lengths), step):
            buffers = self._buffers(_BYTE)
            stop = min(start + step, lengths[self.rank])
            if start < stop:
                copy_range(sends, send_bounds, start, stop, buffers[self._window.index], outward=False)
            yield from self._synchronize()
            for rank, views in enumerate(receives):
                stop = min(start + step, lengths[rank])
                if views is not None and rank != self.rank and start < stop:
                    copy_range(views, receive_bounds[rank], start, stop, buffers[rank], outward=True)

    def alltoall(self, sends: Sequence[Array], receives: Sequence[Array], longest: int) -> Steps:
        row_bytes = self._chunk // self.size // 64 * 64
        own = self.rank
        yield from self.copy(sends[own], receives[own])
        for start in range(0, longest, row_bytes):
            buffers = self._buffers(_BYTE)
            for rank, view in enumerate(sends):
                part = view[start : start + row_bytes]
                if rank != own:
                    buffers[own][rank * row_bytes : rank * row_bytes + part.size] = part
            yield from self._synchronize()
            for rank, view in enumerate(receives):
                part = view[start : start + row_bytes]
                if rank != own:
                    part[...] = buffers[rank][own * row_bytes : own * row_bytes + part.size]

    def reducescatter(self, source: Array, rows: Sequence[int], output: Array, how: Reduction) -> Steps:
        row_length = self._chunk // how.dtype.itemsize // self.size // 16 * 16
        bounds = list(accumulate(rows, initial=0))
        for start in range(0, max(rows), row_length):
            blocks = []
            for rank, (first, last) in enumerate(pairwise(bounds)):
                low, high = first + start, min(first + start + row_length, last)
                segment = Segment(0, low, high, rank * row_length, rank * row_length + high - low)
                blocks.append([segment] if low < high else [])
            part = output[start : start + row_length]
            yield from self.reduce_in_host(blocks, blocks[self.rank], [source], how, part)
            if how.late:
                how.deliver(part, part)
