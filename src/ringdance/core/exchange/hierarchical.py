"""Reduce across several hosts: intra-host reduce, all-reduce across hosts, intra-host all-gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringdance.core.exchange.arithmetic import Reduction, two_stages
from ringdance.core.exchange.base import Array, Context, Steps
from ringdance.core.exchange.chunks import chunks
from ringdance.core.exchange.mpi import ChunkPipeline, MpiExchange, sends_to_few, wire_bytes
from ringdance.core.exchange.shared_memory import MIN_BLOCK_BYTES, SharedMemoryExchange
from ringdance.core.transport.base import Hierarchy, Transport
from ringdance.core.transport.window import Window, window_size


class HierarchicalExchange(MpiExchange):
    """Like ``MpiExchange``, but two-stage reductions of large tensors start inside each host.

    Each block of a chunk has one owner per host. There are as many blocks as the smallest host has members.
    Further members own none, but join in the intra-host reduce and all-gather. If there are many hosts, the
    blocks of several chunks cross together, see ``wire_bytes``.

    Args:
        transport: Connects all members.
        hierarchy: Hosts of the members, and the cross-host communicator.
        chunk_bytes, small_bytes, context: Arguments of ``exchange_for``.
    """

    def __init__(
        self,
        transport: Transport,
        hierarchy: Hierarchy,
        chunk_bytes: int,
        small_bytes: int,
        context: Context,
    ) -> None:
        room = hierarchy.buffer_bytes
        super().__init__(transport, chunk_bytes, small_bytes, context, room)
        self._small, self._sizes = small_bytes, hierarchy.host_sizes
        self._blocks = min(self._sizes)
        self._buffer_bytes = self.most_chunk_bytes = room
        self.flat = None if max(self._sizes) == 1 else False
        block = self._set_chunk(chunk_bytes)
        self.wire_bytes = max(block, wire_bytes(len(self._sizes), block) // block * block)
        self._across_bytes = max(self._most, self.wire_bytes)
        self._untuned = self.wire_bytes, self._chunk
        self.set_chunks(self.chunk_bytes, self.wire_bytes)
        index, count = transport.host_group.index(transport.rank), len(transport.host_group)
        window = transport.window or _private_window(room)
        self._inside = SharedMemoryExchange(window, index, count, self.chunk_bytes, small_bytes, context)
        cross = hierarchy.cross
        wire = self._across_bytes if cross else 0
        self._across = ChunkPipeline(cross or transport, wire, small_bytes, context)

    def _set_chunk(self, chunk_bytes: int) -> int:
        """Change the size of a chunk within hosts. Returns the maximum bytes of a block."""
        # The same on all hosts, regardless of how many members each has.
        self.chunk_bytes = min(max(chunk_bytes, MIN_BLOCK_BYTES * max(self._sizes)), self._buffer_bytes)
        return self.chunk_bytes // self._blocks + MIN_BLOCK_BYTES

    def set_chunks(self, chunk_bytes: int, wire_bytes: int) -> None:
        block = self._set_chunk(chunk_bytes)
        self._together = max(1, min(wire_bytes, self._across_bytes) // block)
        if wire_bytes != self.wire_bytes:
            self._set_wire(wire_bytes)
        if wire_bytes == self._untuned[0]:
            self.wire_bytes, self._chunk = self._untuned

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        if self.flat or how.one_stage or sum(view.nbytes for view in inputs) <= self._small:
            return super().allreduce(inputs, outputs, how)
        return self._large_allreduce(inputs, outputs, how)

    def _large_allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        """While chunks travel between hosts, reduce the next and gather the last ones inside the host."""
        inside, index = self._inside, self._inside.rank
        in_host, across = two_stages(how, inside.size, self._sizes)
        sizes = tuple([view.size for view in inputs])
        plan = chunks(sizes, self.chunk_bytes // how.dtype.itemsize, self._blocks)
        owned = [blocks[index] if index < self._blocks else () for blocks in plan]
        lengths = [block[-1].end - block[0].at if block else 0 for block in owned]
        whole = self._small >= 0 and across.mpi_op is not None and sends_to_few(len(self._sizes))
        together = 1 if whole else self._together
        groups = [range(len(plan))[at : at + together] for at in range(0, len(plan), together)]

        def load(number: int, buffer: Array) -> Steps:
            at = 0
            for chunk in groups[number]:
                total = buffer[at : at + lengths[chunk]]
                yield from inside.reduce_in_host(plan[chunk], owned[chunk], inputs, in_host, total)
                at += lengths[chunk]

        def unload(number: int, buffer: Array) -> Steps:
            at = 0
            for chunk in groups[number]:
                total = buffer[at : at + lengths[chunk]]
                yield from inside.gather_in_host(plan[chunk], owned[chunk], total, outputs, across)
                at += lengths[chunk]

        wires = [sum(lengths[chunk] for chunk in group) for group in groups]
        yield from self._across.run(wires, across, load, unload)


def _private_window(buffer_bytes: int) -> Window:
    """Return the window of a member that is alone on its host. Its memory is private."""
    memory = np.zeros(window_size(1, 0, buffer_bytes) // 8, np.int64).view(np.uint8)
    return Window(memory, 0, 1, 0, buffer_bytes, lambda: None)
